"""`tfgrpo route eval`: estimates and decisions replayed on recorded outcomes, beside rivals.

Does not know how anything is estimated. Source: own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tfgrpo.cli.options import flat
from tfgrpo.cli.route_data import (
    MODEL_READING,
    AsJson,
    Data,
    EmbedderOption,
    ModelReading,
    read_data,
)
from tfgrpo.errors import ConfigError
from tfgrpo.routing.estimator.prompt_features import PromptFeatures, embed_prompts
from tfgrpo.routing.records import OutcomeTable, SuccessCount
from tfgrpo.routing.router_files import features_of
from tfgrpo.runtime.embedders import Embedder, open_embedder
from tfgrpo.runtime.files import write_for_people

__all__ = ["evaluate"]


@dataclass(frozen=True)
class Labels:
    """What a new model is given."""

    sizes: Annotated[str, typer.Option(help="Labels of a new model.")] = "16,64,256"
    draws: Annotated[int, typer.Option(help="Draws of the labels.")] = 2


@dataclass(frozen=True)
class Files:
    """What is kept beside the table."""

    vectors: Annotated[Path | None, typer.Option(help="Folder for cached vectors.")] = None
    plot: Annotated[Path | None, typer.Option(help="Write error against labels as PNG or SVG.")] = (
        None
    )
    cost_plot: Annotated[
        Path | None,
        typer.Option(
            help="Write quality against cost as PNG, SVG or an HTML page; needs prices or recorded "
            "costs."
        ),
    ] = None


_LABELS, _FILES = Labels(), Files()


@flat
def evaluate(
    data: Data,
    embedder: EmbedderOption = "hashed",
    reading: ModelReading = MODEL_READING,
    labels: Labels = _LABELS,
    files: Files = _FILES,
    as_json: AsJson = False,
) -> None:
    """Compare estimators on models that were left out.

    Each family is left out in turn and given N labels. With --cost-plot all models get the
    largest number of labels and answer by the largest prediction less λ·cost.
    """
    from tfgrpo.routing.backtest.backtest import hash_split, identity, replay

    outcomes, infos = read_data(data, reading)
    table = OutcomeTable.from_outcomes(outcomes, infos)
    if len(table.models) < 2:
        raise ConfigError(
            f"the data hold {len(table.models)} model(s); leaving one out needs at least two"
        )
    numbers = _sizes(labels.sizes)
    split = hash_split([identity(p) for p in table.prompts])
    encoder = _encoder(embedder, files.vectors, outcomes, table, split < 6)
    tags = {o.key: o.tags for o in outcomes}
    rows = embed_prompts(encoder, table.prompts, [tags[k] for k in table.keys])
    result = replay(table, rows, encoder, split, sizes=numbers, draws=labels.draws)
    title = ", ".join(p.name for p in data)
    if files.plot is not None:
        from tfgrpo.routing.backtest.plots import label_curves

        label_curves(result.rows, files.plot, title=title)
    decided: dict[str, Any] = {}
    if files.cost_plot is not None:
        decided = _decisions(table, rows, encoder, split, max(numbers), files.cost_plot)
    if as_json:
        row = _eval_row(table, result.rows, result.weights)
        if decided:
            row["decisions"] = [{"method": name, **asdict(s)} for name, s in decided.items()]
        typer.echo(json.dumps(row))
        return
    typer.echo(f"{len(table.keys)} prompts, {len(table.models)} models; Brier / AUC a model")
    typer.echo(f"{'':14}" + "".join(f"{n:>16}" for n in numbers))
    for method in dict.fromkeys(r.method for r in result.rows):
        cells = [result.row(method, n) for n in numbers]
        typer.echo(f"{method:14}" + "".join(f"{f'{r.brier:.4f} / {r.auc:.3f}':>16}" for r in cells))
    for name, value in _singles(table).items():
        typer.echo(f"{name}: {value:.4f}")
    if decided:
        from tfgrpo.routing.backtest.decisions import by_method

        typer.echo(f"decisions with {max(numbers)} labels a model")
        typer.echo(by_method(list(decided.items())))


def _encoder(
    spec: str,
    cache: Path | None,
    outcomes: Sequence[SuccessCount],
    table: OutcomeTable,
    is_train: Any,
) -> Embedder:
    """As a router has it: lengths and tags beside the text, known from train alone."""
    known = {k for k, train in zip(table.keys, is_train, strict=True) if train}
    features = features_of([o for o in outcomes if o.key in known], spec)
    return PromptFeatures(
        open_embedder(spec, cache=cache), tags=features["tags"],
        shared=(features["shared"][0], features["shared"][1]),
        weights=(features["weights"][0], features["weights"][1]),
    )  # fmt: skip


def _decisions(
    table: OutcomeTable, rows: Any, encoder: Embedder, split: Any, n: int, path: Path
) -> dict[str, Any]:
    """Standing of each method's decisions on the test prompts that every model answered."""
    from tfgrpo.routing.backtest.decisions import (
        BacktestData,
        chances,
        costs_of,
        curves_of,
        standing,
    )
    from tfgrpo.routing.backtest.plots import cost_curves

    whole = (table.trials > 0).all(axis=1)
    test = np.flatnonzero((split >= 8) & whole)
    if not len(test):
        raise ConfigError("no test prompt has an outcome of every model: decisions need some")
    ground = BacktestData(table, rows, encoder, np.flatnonzero(split < 6), test)
    cost, quality = costs_of(table, test), table.rates[test]
    value = chances(ground, n)
    curves, title = curves_of(value, cost, quality), f"{n} labels a model"
    stands = dict(standing([value], cost, quality))
    if path.suffix.lower() != ".html":
        cost_curves(curves, path, title=title)
        return stands
    from tfgrpo.report.served.routing import render_routing
    from tfgrpo.routing.backtest.metrics import hull

    points = {name: list(zip(*hull(c.cost, c.quality), strict=True)) for name, c in curves.items()}
    singles = zip(table.model_names, cost.mean(axis=0), quality.mean(axis=0), strict=True)
    page = render_routing(f"Routing with {title}", points, list(singles), stands)
    write_for_people(path, page)
    return stands


def _sizes(text: str) -> list[int]:
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ConfigError(f"sizes {text!r}: allowed are positive whole numbers such as 16,64,256")
    return [int(p) for p in parts]


def _eval_row(table: OutcomeTable, rows: Any, weights: Any) -> dict[str, Any]:
    return {
        "prompts": len(table.keys),
        "models": len(table.models),
        "rows": [r.to_dict() for r in rows],
        "layer_weights": {str(n): w for n, w in weights.items()},
        **_singles(table),
    }


def _singles(table: OutcomeTable) -> dict[str, float]:
    """Best single model and oracle over the prompts that every model has answered."""
    full = (table.trials > 0).all(axis=1)
    if not full.any():
        return {}
    rates = table.rates[full]
    return {
        "best_single": round(float(rates.mean(axis=0).max()), 4),
        "oracle": round(float(rates.max(axis=1).mean()), 4),
    }
