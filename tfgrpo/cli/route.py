"""`tfgrpo route fit | ask | calibrate | eval | onboard | serve`.

Does not know formats or estimates; reads, calls, prints. Source: own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from tfgrpo.cli.options import flat
from tfgrpo.cli.route_data import (
    MODEL_READING,
    READING,
    AsJson,
    Data,
    EmbedderOption,
    Folder,
    ModelReading,
    Reading,
    SuccessAt,
    read_data,
)
from tfgrpo.cli.route_eval import evaluate
from tfgrpo.errors import ConfigError
from tfgrpo.routing.outcome_files import read_outcomes
from tfgrpo.routing.promises import Calibrated, calibrate_router
from tfgrpo.routing.records import ModelInfo, OutcomeTable
from tfgrpo.routing.router import Router
from tfgrpo.routing.router_files import LEAST_REFERENCE
from tfgrpo.routing.rules import DEFAULT_TARGET
from tfgrpo.routing.verbs import fit as routing_fit
from tfgrpo.routing.verbs import route
from tfgrpo.runtime.terminal import printable

ENOUGH = 64
"""Outcomes of a new model that on average find it where it is better; 16 never did."""

app = typer.Typer(no_args_is_help=True, help="Route tasks to models by predicted success.")
app.command("eval")(evaluate)


@app.command("fit")
@flat
def fit(
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Folder to write the router to.")],
    embedder: EmbedderOption = "hashed",
    reading: ModelReading = MODEL_READING,
    least_reference: Annotated[
        int, typer.Option(help="Outcomes that make a model a reference.")
    ] = LEAST_REFERENCE,
    as_json: AsJson = False,
) -> None:
    """Fit a router on recorded outcomes: seconds, no training."""
    router = routing_fit(
        data, models=reading.models or (), embedder=embedder,
        format=reading.format,  # type: ignore[arg-type]  # checked by read_outcomes
        success_at=reading.success_at, least_reference=least_reference, out=out,
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


@dataclass(frozen=True)
class RuleOptions:
    """How a model is chosen."""

    target: Annotated[
        float | None,
        typer.Option(
            help="Cheapest model whose lower bound clears this; default the router's gates, or "
            f"{DEFAULT_TARGET:g}."
        ),
    ] = None
    per_usd: Annotated[float | None, typer.Option(help="Largest p − per_usd · cost instead.")] = (
        None
    )
    fallback: Annotated[
        str | None, typer.Option(help="Who answers when nobody qualifies; default the best.")
    ] = None


@dataclass(frozen=True)
class PriceOptions:
    """Dollars per million tokens."""

    input_usd_per_mtok: Annotated[float | None, typer.Option(help="Input price.")] = None
    output_usd_per_mtok: Annotated[float | None, typer.Option(help="Output price.")] = None


@dataclass(frozen=True)
class PromiseOptions:
    """What routing may lose."""

    risk: Annotated[
        str,
        typer.Option(
            help="net: mean quality below the strong model; regret: prompts lost that it would "
            "have solved; failure: failures among those kept."
        ),
    ] = "net"
    delta: Annotated[float, typer.Option(help="What the risk may come to.")] = 0.02
    confidence: Annotated[float, typer.Option(help="Of the promise.")] = 0.9
    against: Annotated[str, typer.Option(help="The strong model; default the best.")] = ""
    weak: Annotated[
        list[str] | None, typer.Option(help="A cheap model; default all that cost less.")
    ] = None


_RULE, _PRICE, _PROMISE = RuleOptions(), PriceOptions(), PromiseOptions()


@app.command("ask")
@flat
def ask(
    folder: Folder,
    prompt: Annotated[str, typer.Argument(help="The prompt to route.")],
    rule: RuleOptions = _RULE,
    question: Annotated[
        str | None, typer.Option(help="The part of the prompt that says what is asked.")
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option("--meta", help="NAME=VALUE, such as dataset=mmlu.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose a model for one prompt: the ranking and the reason."""
    pairs = dict(_pair(p) for p in metadata or [])
    decision = route(folder, prompt, question=question, metadata=pairs, **asdict(rule))
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


@app.command("onboard")
@flat
def onboard(
    folder: Folder,
    model: Annotated[str, typer.Option("--model", help="Name of the new model.")],
    n: Annotated[int, typer.Option("-n", help="Prompts to run on it.")] = 32,
    outcomes: Annotated[
        Path | None, typer.Option(help="Outcomes of the new model: adds them to the router.")
    ] = None,
    price: PriceOptions = _PRICE,
    method: Annotated[str, typer.Option(help="gain, k_centre or random.")] = "gain",
    success_at: SuccessAt = None,
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
        info = ModelInfo(model, "", price.input_usd_per_mtok, price.output_usd_per_mtok)
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


@app.command("calibrate")
@flat
def calibrate(
    folder: Folder,
    data: Data,
    promise: PromiseOptions = _PROMISE,
    dry: Annotated[bool, typer.Option("--dry-run", help="Tell, change nothing.")] = False,
    reading: Reading = READING,
    as_json: AsJson = False,
) -> None:
    """Promise a bound on what routing loses.

    It is measured on outcomes kept apart from the fit.

    Says first what could be had at all. The router keeps the promise from then on.
    """
    router = Router.load(folder)
    outcomes, _ = read_data(data, reading)
    found = calibrate_router(router, outcomes, **asdict(promise) | {"weak": promise.weak or ()})
    if not dry:
        router.save(folder)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    for line in _promise_lines(found, promise.delta):
        typer.echo(printable(line))
    typer.echo("nothing was changed" if dry else f"written to {printable(str(folder))}")


def _promise_lines(found: Calibrated, delta: float) -> list[str]:
    first = next(iter(found.gates.values()))
    lines = [
        f"{found.prompts} held-out prompts; left out: {found.seen} that the router was fitted on, "
        f"{found.partial} without an outcome of every model",
        f"what could be had at {delta:.1%}: {found.attainable:.1%} of the prompts on models "
        f"cheaper than {found.against}, by the best threshold in hindsight",
    ]
    if not first.is_open:
        return [*lines, f"promise: none; {first.promise}"]
    shares = ", ".join(f"{g.model} {g.coverage:.1%}" for g in found.gates.values())
    return [
        *lines,
        f"promise: {first.promise}",
        f"kept on cheaper models: {found.coverage:.1%} ({shares})",
    ]


@app.command("serve")
def serve(
    folder: Folder,
    lm: Annotated[
        list[str] | None,
        typer.Option(
            "--lm",
            help="NAME=SPEC for each model, such as small=openai:gpt-5-nano; default the models "
            "whose names are specs.",
        ),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Cheapest model whose lower bound clears this.")
    ] = None,
    per_usd: Annotated[float | None, typer.Option(help="Largest p − per_usd · cost.")] = None,
    journal: Annotated[str, typer.Option(help="Folder of the journal.")] = "runs/gateway",
    listen: Annotated[str, typer.Option(help="Address of the API.")] = "127.0.0.1:8080",
) -> None:
    """Serve the router's models as one model.

    Its OpenAI-compatible name is `auto`.

    For keys, budgets, libraries and learning name the folder as `router` of a route instead
    (docs/serve.md).
    """
    from tfgrpo.cli.serve import run_gateway
    from tfgrpo.serve.settings import GatewaySettings

    router = Router.load(folder)
    specs = dict(_spec(text) for text in lm or [])
    if not specs:
        specs = {f"m{i}": n for i, n in enumerate(router.model_names) if ":" in n}
    if not specs:
        raise ConfigError(
            f"the router's models {', '.join(router.model_names)} are not specs: give each as "
            "--lm NAME=SPEC, such as --lm small=openai:gpt-5-nano"
        )
    rule = {"target": target, "per_usd": per_usd}
    settings = GatewaySettings.from_mapping(
        {
            "serve": {"folder": journal},
            "upstreams": {name: {"lm": spec} for name, spec in specs.items()},
            "routes": {"auto": {"upstreams": list(specs), "router": str(folder), "rule": rule}},
        },
        "the options of route serve",
    )
    run_gateway(lambda: settings, listen=listen)


def _spec(text: str) -> tuple[str, str]:
    name, mark, spec = text.partition("=")
    if not (name and mark and spec):
        raise ConfigError(f"--lm {text!r}: allowed is NAME=SPEC, such as small=openai:gpt-5-nano")
    return name, spec
