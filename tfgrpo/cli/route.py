"""`tfgrpo route fit | ask | eval | onboard`.

Does not know formats or estimates; reads, calls, prints. Source: own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tfgrpo.errors import ConfigError
from tfgrpo.routing.outcome_files import Format, read_models, read_outcomes
from tfgrpo.routing.records import ModelInfo, OutcomeTable, SuccessCount
from tfgrpo.routing.router import Router
from tfgrpo.routing.router_files import LEAST_REFERENCE
from tfgrpo.routing.rules import DEFAULT_TARGET
from tfgrpo.routing.verbs import fit as routing_fit
from tfgrpo.routing.verbs import route
from tfgrpo.runtime.terminal import printable

ENOUGH = 64
"""Outcomes of a new model that on average find it where it is better; 16 never did."""

app = typer.Typer(no_args_is_help=True, help="Route tasks to models by predicted success.")

_Data = Annotated[
    list[Path], typer.Argument(help="Outcome files, groups files, result or run folders.")
]
_Folder = Annotated[Path, typer.Argument(help="Folder of a fitted router.")]
_FormatOption = Annotated[
    str,
    typer.Option("--format", help="auto, jsonl, csv, groups, run, routerbench, llmrouterbench."),
]
_SuccessAt = Annotated[
    float | None, typer.Option(help="Reward from which a rollout counts as a success.")
]
_Models = Annotated[
    Path | None, typer.Option("--models", help="JSON list of names, families and prices.")
]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
_EmbedderOption = Annotated[
    str, typer.Option("--embedder", help="hashed, minilm or sentence:NAME.")
]


def _read(
    paths: list[Path], format: str, success_at: float | None, models: Path | None
) -> tuple[list[SuccessCount], list[ModelInfo]]:
    kind: Format = format  # type: ignore[assignment]  # checked by read_outcomes
    outcomes = [o for p in paths for o in read_outcomes(p, format=kind, success_at=success_at)]
    return outcomes, read_models(models) if models is not None else []


@app.command("fit")
def fit(
    data: _Data,
    out: Annotated[Path, typer.Option("--out", help="Folder to write the router to.")],
    embedder: _EmbedderOption = "hashed",
    format: _FormatOption = "auto",
    success_at: _SuccessAt = None,
    models: _Models = None,
    least_reference: Annotated[
        int, typer.Option(help="Outcomes that make a model a reference.")
    ] = LEAST_REFERENCE,
    as_json: _Json = False,
) -> None:
    """Fit a router on recorded outcomes: seconds, no training."""
    router = routing_fit(
        data, models=models or (), embedder=embedder, format=format,  # type: ignore[arg-type]
        success_at=success_at, least_reference=least_reference, out=out,
    )  # fmt: skip
    pool = router.value.pool
    row = {
        "folder": str(out),
        "outcomes": len(router.outcomes()),
        "models": list(router.model_names),
        "reference_models": list(pool.model_names),
        "reference_prompts": len(pool.keys),
        "embedder": router.embedder.embedder_id,
    }
    if as_json:
        typer.echo(json.dumps(row))
        return
    typer.echo(
        f"{row['outcomes']} outcomes of {len(router.models)} models; {pool.size} are references on "
        f"{len(pool.keys)} prompts; written to {printable(str(out))}"
    )
    if not pool.size:
        typer.echo(
            f"no model has {least_reference} outcomes: every model stands on its own outcomes"
        )
    if embedder.startswith("hashed"):
        typer.echo(
            "hashed vectors know words, not meaning: --embedder minilm routes unlike wording better"
        )
    typer.echo(
        f"'tfgrpo route ask' takes the cheapest model whose lower bound clears {DEFAULT_TARGET:g}, "
        f"else {printable(router.fallback)}; --per-usd weighs success against dollars instead"
    )


@app.command("ask")
def ask(
    folder: _Folder,
    prompt: Annotated[str, typer.Argument(help="The prompt to route.")],
    target: Annotated[
        float | None,
        typer.Option(
            help="Cheapest model whose lower bound clears this; default the router's gates, or "
            f"{DEFAULT_TARGET:g}."
        ),
    ] = None,
    per_usd: Annotated[
        float | None, typer.Option(help="Largest p − per_usd · cost instead.")
    ] = None,
    fallback: Annotated[
        str | None, typer.Option(help="Who answers when nobody qualifies; default the best.")
    ] = None,
    question: Annotated[
        str | None, typer.Option(help="The part of the prompt that says what is asked.")
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option("--meta", help="NAME=VALUE, such as dataset=mmlu.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Choose a model for one prompt: the ranking and the reason."""
    pairs = dict(_pair(p) for p in metadata or [])
    decision = route(
        folder, prompt, question=question, metadata=pairs, target=target, per_usd=per_usd,
        fallback=fallback,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(decision.to_dict()))
        return
    typer.echo(f"{printable(decision.model)} ({decision.kind})")
    typer.echo(printable(decision.reason))
    for c in decision.ranking:
        cost = "cost unknown" if c.cost_usd is None else f"${c.cost_usd:.3g}"
        layers = ", ".join(f"{k} {v:.0%}" for k, v in c.weights.items())
        typer.echo(
            f"  {printable(c.model)}: p {c.mean:.2f} [{c.low:.2f}, {c.high:.2f}], {cost}, "
            f"n_eff {c.effective_n:.0f}, {c.coverage}; {layers}"
        )


def _pair(text: str) -> tuple[str, str]:
    name, mark, value = text.partition("=")
    if not (name and mark and value):
        raise ConfigError(f"--meta {text!r}: allowed is NAME=VALUE, such as dataset=mmlu")
    return name, value


@app.command("eval")
def evaluate(
    data: _Data,
    embedder: _EmbedderOption = "hashed",
    format: _FormatOption = "auto",
    success_at: _SuccessAt = None,
    models: _Models = None,
    sizes: Annotated[str, typer.Option(help="Labels of a new model.")] = "16,64,256",
    draws: Annotated[int, typer.Option(help="Draws of the labels.")] = 2,
    vectors: Annotated[Path | None, typer.Option(help="Folder for cached vectors.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curves as PNG or SVG.")] = None,
    as_json: _Json = False,
) -> None:
    """Compare estimators on models that were left out."""
    from tfgrpo.routing.backtest.backtest import hash_split, identity, replay
    from tfgrpo.runtime.embedders import VectorCache, open_embedder

    outcomes, infos = _read(data, format, success_at, models)
    table = OutcomeTable.from_outcomes(outcomes, infos)
    if len(table.models) < 2:
        raise ConfigError(
            f"the data hold {len(table.models)} model(s); leaving one out needs at least two"
        )
    numbers = _sizes(sizes)
    encoder = open_embedder(embedder)
    if vectors is not None:
        encoder = VectorCache(encoder, vectors)
    result = replay(
        table,
        encoder.embed(table.prompts),
        encoder,
        hash_split([identity(p) for p in table.prompts]),
        sizes=numbers,
        draws=draws,
    )
    if plot is not None:
        from tfgrpo.routing.backtest.plots import label_curves

        label_curves(result.rows, plot, title=", ".join(p.name for p in data))
    if as_json:
        typer.echo(json.dumps(_eval_row(table, result.rows, result.weights)))
        return
    typer.echo(f"{len(table.keys)} prompts, {len(table.models)} models; Brier / AUC a model")
    typer.echo(f"{'':12}" + "".join(f"{n:>16}" for n in numbers))
    for method in dict.fromkeys(r.method for r in result.rows):
        cells = [result.row(method, n) for n in numbers]
        typer.echo(f"{method:12}" + "".join(f"{f'{r.brier:.4f} / {r.auc:.3f}':>16}" for r in cells))
    for name, value in _singles(table).items():
        typer.echo(f"{name}: {value:.4f}")


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


@app.command("onboard")
def onboard(
    folder: _Folder,
    model: Annotated[str, typer.Option("--model", help="Name of the new model.")],
    n: Annotated[int, typer.Option("-n", help="Prompts to run on it.")] = 32,
    outcomes: Annotated[
        Path | None, typer.Option(help="Outcomes of the new model: adds them to the router.")
    ] = None,
    input_usd_per_mtok: Annotated[float | None, typer.Option(help="Input price.")] = None,
    output_usd_per_mtok: Annotated[float | None, typer.Option(help="Output price.")] = None,
    method: Annotated[str, typer.Option(help="gain, k_centre or random.")] = "gain",
    success_at: _SuccessAt = None,
) -> None:
    """Choose prompts for a new model, or take its answers in.

    Prompts are printed as JSON lines: prompt_id, prompt.
    """
    from tfgrpo.routing.label_selection import at_random, choose_prompts, k_centre

    router = Router.load(folder)
    if outcomes is not None:
        rows = [o for o in read_outcomes(outcomes, success_at=success_at) if o.model == model]
        if not rows:
            raise ConfigError(f"{str(outcomes)!r} holds no outcome of model {model!r}")
        info = ModelInfo(model, "", input_usd_per_mtok, output_usd_per_mtok)
        router.add(info)
        router.record(*rows)
        router.save(folder)
        typer.echo(f"{len(rows)} outcomes of {printable(model)} added to {printable(str(folder))}")
        if len(router.outcomes(model)) < ENOUGH:
            typer.echo(
                f"{len(router.outcomes(model))} outcomes rarely show that a new model is better; "
                f"{ENOUGH} do on average"
            )
        return
    table = OutcomeTable.from_outcomes(router.outcomes(), router.models)
    n = min(n, len(table.keys))
    vectors = router.known_vectors(table.keys)
    kind: Literal["gain", "k_centre", "random"] | str = method
    if kind == "gain":
        chosen = choose_prompts(router.value, vectors, n)
    elif kind == "k_centre":
        chosen = k_centre(vectors, n)
    elif kind == "random":
        chosen = at_random(len(table.keys), n)
    else:
        raise ConfigError(f"method {method!r} is unknown: use gain, k_centre or random")
    for i in chosen:
        typer.echo(json.dumps({"prompt_id": table.keys[i], "prompt": table.prompts[i]}))
    typer.echo(
        f"next: run {model} on these, write one JSON line each with prompt_id, prompt, model and "
        f"reward, then: tfgrpo route onboard {folder} --model {model} --outcomes FILE",
        err=True,
    )
