"""The verbs of routing in Python: fit a router on outcomes, load one, route a prompt.

The command line calls these. Does not know how anything is estimated. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.routing.outcome_files import Format, read_models, read_outcomes
from tfgrpo.routing.records import ModelInfo, SuccessCount
from tfgrpo.routing.router import Router
from tfgrpo.routing.router_files import LEAST_REFERENCE, fit_files
from tfgrpo.routing.rules import Cheapest, RouteDecision, RouteRule, TradeOff

__all__ = ["fit", "load", "route", "rule_of"]

Data = str | Path | Sequence[str | Path] | Sequence[SuccessCount]


def fit(
    data: Data,
    *,
    models: str | Path | Sequence[ModelInfo] = (),
    embedder: str = "hashed",
    format: Format = "auto",
    success_at: float | None = None,
    least_reference: int = LEAST_REFERENCE,
    out: str | Path | None = None,
) -> Router:
    """Fit a router on recorded outcomes: no training; every state is fitted and ready.

    Args:
        data: outcomes, or files and folders that hold them.
        models: prices and families, or the JSON file that lists them.
        embedder: `hashed`, `minilm`, `sentence:NAME`, or several joined by `+`.
        format: of the files; `auto` tells them apart.
        success_at: reward from which a rollout counts as a success; None takes 0 to 1 as it is.
        least_reference: outcomes that make a model a reference for the others.
        out: folder to write the router to.

    Raises:
        ConfigError: there are no outcomes, or a file, line or value is wrong.
    """
    outcomes = _outcomes(data, format, success_at)
    infos = read_models(models) if isinstance(models, (str, Path)) else list(models)
    files = fit_files(
        outcomes, infos, embedder_spec=embedder, folder=out or ".",
        least_reference=least_reference,
    )  # fmt: skip
    if out is not None:
        files.save(out)
    router = Router.of_files(files)
    router.prepare()
    return router


def _outcomes(data: Data, format: Format, success_at: float | None) -> list[SuccessCount]:
    if isinstance(data, (str, Path)):
        data = [data]
    found: list[SuccessCount] = []
    for item in data:
        if isinstance(item, SuccessCount):
            found.append(item)
        else:
            found += read_outcomes(item, format=format, success_at=success_at)
    return found


def load(folder: str | Path, **options: Any) -> Router:
    """Return the router of a folder; options are those of `Router.load`."""
    return Router.load(folder, **options)


def rule_of(target: float | None, per_usd: float | None) -> RouteRule | None:
    """Return the rule that two settings name; None leaves the choice to the router.

    Raises:
        ConfigError: both are given.
    """
    if target is not None and per_usd is not None:
        raise ConfigError("give a target or per_usd, not both: they are two different rules")
    if per_usd is not None:
        return TradeOff(per_usd)
    return None if target is None else Cheapest(target)


def route(
    router: Router | str | Path,
    prompt: str,
    *,
    question: str | None = None,
    metadata: Mapping[str, str] | None = None,
    target: float | None = None,
    per_usd: float | None = None,
    fallback: str | None = None,
) -> RouteDecision:
    """Choose a model for one prompt; for many, load the router once and call its `ask`.

    Args:
        router: a router, or the folder of one.
        prompt: the whole text to be answered.
        question: the part of it that says what is asked; default all.
        metadata: dataset, category, language and the like.
        target: the cheapest model whose lower bound clears it (default of the folder: its gates,
            or 0.8).
        per_usd: the largest p − per_usd · dollars instead.
        fallback: who answers when nobody qualifies; default the model with the best success rate.
    """
    rule = rule_of(target, per_usd)
    if not isinstance(router, Router):
        router = Router.load(router, rule=rule, fallback=fallback)
    elif rule is not None or fallback is not None:
        router = router.with_rule(rule or router.rule, fallback or router.fallback)
    return router.ask(prompt, question=question, metadata=metadata)
