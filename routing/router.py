"""Choose a model for a prompt, and say why.

Every model's estimate is judged by the rule; what happens to its choice is in `deciding`. New
outcomes are worked in without training; any number of threads may ask and record at once.
Does not know how to call a model (`routed_lm`), how candidates are judged (`rules`), how states are
kept (`served`) or files (`router_files`). Source: own.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tfgrpo.errors import ConfigError
from tfgrpo.routing.calibration import Gate
from tfgrpo.routing.deciding import Explorer, Session, Sessions, fall_back
from tfgrpo.routing.estimator.prompt_features import embed_prompts, prepare
from tfgrpo.routing.estimator.value_model import ModelState, ValueModel
from tfgrpo.routing.records import ModelInfo, SuccessCount, tags_of
from tfgrpo.routing.router_files import RouterFiles
from tfgrpo.routing.rules import (
    Candidate,
    Cheapest,
    Guaranteed,
    RouteDecision,
    RouteRule,
)
from tfgrpo.routing.served import First, Refit, Saved, Snapshot, StateKeeper
from tfgrpo.runtime.cooldown import Cooldowns
from tfgrpo.runtime.embedders import Embedder, Floats

__all__ = ["Router", "RouterOptions", "Session"]


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """How a router behaves besides its rule."""

    interval: float = 0.9
    """Probability mass of the intervals."""
    cooldowns: Cooldowns | None = None
    """Which models may be tried; None means all, always."""
    switch_margin: float = 0.02
    """Least gain in utility that makes a session change its model."""
    explore_usd: float | None = None
    """Cap on the extra expected dollars of Thompson exploration; None is none."""
    seed: int = 0
    """Of the Thompson draws."""
    max_sessions: int = 10_000
    """Sessions remembered; the oldest go first."""
    refit: Refit = "background"
    """`background`: only the first ask waits for states, later outcomes are worked in behind the
    answers. `wait`: every ask sees all that was recorded before it."""
    first: First = "wait"
    """`wait`: before the states are there an ask waits for them. `rates`: it is answered at once by
    the models' success rates, and by states as soon as they are there; so is an ask while a
    sentence encoder is being loaded."""
    refit_every_s: float = 1.0
    """Least seconds between two refits in the background."""


DEFAULT_RULE, DEFAULT_OPTIONS = Cheapest(), RouterOptions()

_MULTIPLYING = threading.Lock()
"""Threads that multiply at once share the BLAS's workers and spin while they wait for each other:
one after the other, eight threads get ten times as many answers a second."""


class Router:
    """Models with their outcomes, a rule, a named fallback; safe between threads."""

    def __init__(
        self,
        value: ValueModel,
        models: Sequence[ModelInfo],
        outcomes: Iterable[SuccessCount] = (),
        *,
        rule: RouteRule = DEFAULT_RULE,
        fallback: str,
        options: RouterOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Set up the router; states are made at the first ask, or by `prepare`.

        Args:
            value: makes the estimates.
            models: who can be chosen; prices make costs.
            outcomes: what is known of them so far.
            rule: how candidates are judged.
            fallback: model that answers when nothing qualifies.
            options: intervals, cooldowns, sessions, exploration, refits.
        """
        self._set_up(lambda: value, value.embedder, models, rule, fallback, options)
        self.record(*outcomes)

    def _set_up(
        self,
        value: Callable[[], ValueModel],
        embedder: Embedder,
        models: Sequence[ModelInfo],
        rule: RouteRule,
        fallback: str,
        options: RouterOptions,
    ) -> None:
        names = [m.name for m in models]
        if len(set(names)) != len(names) or not names:
            raise ConfigError(f"models {names}: give at least one, each under a name of its own")
        if fallback not in names:
            raise ConfigError(f"fallback {fallback!r} is not among the models {names}")
        self.rule, self.fallback, self.options = rule, fallback, options
        self._value_of, self.embedder = value, embedder
        self.embedder_spec = ""
        self.gates: dict[str, Gate] = {}
        self._keeper = StateKeeper(
            value, models, refit=options.refit, every_s=options.refit_every_s, first=options.first,
            warm_up=lambda: prepare(embedder),
        )  # fmt: skip
        self._outcomes: dict[str, list[SuccessCount]] = {name: [] for name in names}
        self._stored: Callable[[], Sequence[SuccessCount]] = lambda: ()
        self._explorer = Explorer(options.explore_usd, options.seed)
        self._sessions = Sessions(options.max_sessions)

    @classmethod
    def restore(
        cls,
        value: Callable[[], ValueModel],
        embedder: Embedder,
        models: Sequence[ModelInfo],
        saved: Saved,
        *,
        rule: RouteRule,
        options: RouterOptions,
        outcomes: Callable[[], Sequence[SuccessCount]],
    ) -> Router:
        """Return a router from stored states; `value` and `outcomes` are read when needed."""
        router = cls.__new__(cls)
        names = [m.name for m in models]
        router._set_up(value, embedder, models, rule, names[0], options)
        router._stored = outcomes
        router._keeper.restore(saved)
        return router

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        rule: RouteRule | None = None,
        fallback: str | None = None,
        options: RouterOptions = DEFAULT_OPTIONS,
    ) -> Router:
        """Return a router from a folder that `fit` or `tfgrpo route fit` wrote.

        Without a rule its calibrated gates decide, or else the cheapest model whose lower bound
        clears 0.8; without a fallback the strong model of the gates answers, or else the model with
        the best success rate.

        Raises:
            StoreError: files are missing, damaged or of another version.
        """
        files = RouterFiles.load(folder)
        return cls.of_files(files, rule=rule, fallback=fallback, options=options)

    @classmethod
    def of_files(
        cls,
        files: RouterFiles,
        *,
        rule: RouteRule | None = None,
        fallback: str | None = None,
        options: RouterOptions = DEFAULT_OPTIONS,
    ) -> Router:
        """Return a router of what was read or fitted; see `load`."""
        if rule is None:
            rule = Guaranteed(files.gates) if files.gates else DEFAULT_RULE
        names = [m.name for m in files.models]
        if files.saved is None:
            router = cls(
                files.value, files.models, files.outcomes, rule=rule, fallback=names[0],
                options=options,
            )  # fmt: skip
        else:
            router = cls.restore(
                lambda: files.value, files.embedder, files.models, files.saved, rule=rule,
                options=options, outcomes=lambda: files.outcomes,
            )  # fmt: skip
        router.embedder_spec, router.gates = files.embedder_spec, dict(files.gates)
        promised = [g.against for g in files.gates.values() if g.against in names]
        if fallback is None:
            # The strong model of a promise answers what no gate keeps.
            fallback = promised[0] if promised else router.best_model()
        router.fallback = fallback
        router._check(router.fallback)
        return router

    def save(self, folder: str | Path) -> None:
        """Write models, outcomes, reference pool and states; readers see all of it or nothing."""
        files = RouterFiles.lazy(
            self.embedder, self.embedder_spec, self.models, lambda: self.value, self.outcomes
        )
        files.saved, files.gates = self.saved(), dict(self.gates)
        files.save(folder)

    @property
    def value(self) -> ValueModel:
        """What makes the estimates."""
        return self._value_of()

    @property
    def model_names(self) -> tuple[str, ...]:
        """Who can be chosen."""
        return self._keeper.names

    @property
    def models(self) -> tuple[ModelInfo, ...]:
        """Prices and families of all models."""
        return tuple(self._keeper.info(name) for name in self._keeper.names)

    @property
    def cooldowns(self) -> Cooldowns | None:
        """The health of the models."""
        return self.options.cooldowns

    @property
    def states_built(self) -> int:
        """Full fits of a model's state so far."""
        return self._keeper.states_built

    def with_rule(self, rule: RouteRule, fallback: str) -> Router:
        """Return a router that shares everything with this one but its rule and fallback."""
        self._check(fallback)
        other = copy.copy(self)
        other.rule, other.fallback = rule, fallback
        return other

    def promise(self, gates: Mapping[str, Gate], against: str) -> None:
        """Let calibrated gates decide from now on; the strong model answers what none keeps."""
        self._check(against)
        self.gates = dict(gates)
        self.rule, self.fallback = Guaranteed(self.gates), against

    def best_model(self) -> str:
        """Return the model with the best smoothed success rate over its outcomes."""
        rates = self._keeper.rates()
        return max(rates, key=lambda name: rates[name])

    def info(self, model: str) -> ModelInfo:
        """Return prices and family of a model.

        Raises:
            ConfigError: the router has no such model.
        """
        self._check(model)
        return self._keeper.info(model)

    def outcomes(self, model: str | None = None) -> tuple[SuccessCount, ...]:
        """Return what is known of a model, or of all."""
        if model is not None:
            self._check(model)
        stored = [o for o in self._stored() if model in (None, o.model)]
        names = self._outcomes if model is None else [model]
        return (*stored, *(o for name in names for o in self._outcomes.get(name, ())))

    def _check(self, model: str) -> None:
        if model not in self._keeper.names:
            raise ConfigError(
                f"model {model!r} is unknown to this router; it has "
                f"{', '.join(self._keeper.names)}: add it with its prices, then record outcomes"
            )

    def add(self, info: ModelInfo) -> None:
        """Add a model, or change its prices."""
        self._outcomes.setdefault(info.name, [])
        self._keeper.add(info)

    def record(self, *outcomes: SuccessCount) -> None:
        """Append outcomes; late, missing and repeated ones are fine.

        Raises:
            ConfigError: an outcome of a model that the router does not have; nothing is recorded.
        """
        for outcome in outcomes:
            self._check(outcome.model)
        for outcome in outcomes:
            self._outcomes.setdefault(outcome.model, []).append(outcome)
        self._keeper.record(outcomes)

    def prepare(self) -> None:
        """Fit every state to every outcome now; an ask afterwards waits for nothing."""
        self._keeper.prepare()

    def known_vectors(self, keys: Sequence[str]) -> Floats:
        """Return the vectors of known prompts, by key."""
        ground = self.saved().ground
        line = {key: i for i, key in enumerate(ground.keys)}
        return ground.vectors[[line[key] for key in keys]]

    def saved(self) -> Saved:
        """Return outcomes and states as they are stored."""
        return self._keeper.saved()

    def close(self) -> None:
        """End the refits in the background."""
        self._keeper.close()

    def state(self, model: str) -> ModelState:
        """Return a model's state for many prompts at once, fitted anew from its outcomes."""
        self._check(model)
        value, pool = self.value, self.value.pool
        if model in pool.model_names:
            # A model never is its own reference.
            value = ValueModel(value.embedder, pool.without(names=[model]), layers=value.layers)
        return value.state(self.outcomes(model), model=model)

    def ask(
        self,
        prompt: str,
        *,
        question: str | None = None,
        metadata: Mapping[str, str] | None = None,
        vector: Floats | None = None,
        session: Session | str | None = None,
        among: Sequence[str] | None = None,
    ) -> RouteDecision:
        """Choose a model.

        Args:
            prompt: the whole text to be answered; its length makes costs.
            question: the part that says what is asked, where documents surround it; default all.
            metadata: what else is known of it, such as dataset, category or language.
            vector: its vector where it is known already, shape (width,).
            session: conversation it belongs to, by name or with the tokens to read anew.
            among: restrict the choice to these models.

        Raises:
            ConfigError: an empty prompt or an unknown model in `among`.
            NoneHealthyError: every model is cooling down and the cooldowns say raise.
        """
        text = _read(prompt, question)
        snapshot = self._keeper.snapshot()
        candidates = self._asked(snapshot, prompt, text, metadata, vector, among)
        usable = [c for c in candidates if c.state != "cooling"] or candidates
        qualified = [c for c in usable if c.qualifies]
        ranking = tuple(
            sorted(
                candidates,
                key=lambda c: (c.state == "cooling", not c.qualifies, -c.utility, -c.mean),
            )
        )
        if isinstance(session, str):
            session = Session(session)
        if not qualified:
            decision = fall_back(ranking, usable, self.fallback)
        else:
            best = max(qualified, key=lambda c: (c.utility, c.mean))
            decision = RouteDecision(best.model, f"{best.model}: {best.note}", ranking, "rule")
            decision = self._sessions.stay(
                decision, qualified, session, self.rule,
                input_usd_per_mtok=self.info(best.model).input_usd_per_mtok or 0.0,
                margin=self.options.switch_margin,
            )  # fmt: skip
            decision = self._explorer.turn(decision, usable, self.rule)
        self._sessions.remember(session, decision.model)
        if not snapshot.reads_prompts:
            reason = f"{decision.reason}; by success rates alone, while the states are being made"
            return replace(decision, reason=reason, share_read=0.0)
        return self._said(decision, text)

    def candidates(
        self,
        prompt: str,
        *,
        question: str | None = None,
        metadata: Mapping[str, str] | None = None,
        vector: Floats | None = None,
        among: Sequence[str] | None = None,
    ) -> list[Candidate]:
        """Return every model's standing, judged by the rule, without choosing; raises as `ask`."""
        snapshot = self._keeper.snapshot()
        return self._asked(snapshot, prompt, _read(prompt, question), metadata, vector, among)

    def _asked(
        self,
        snapshot: Snapshot,
        prompt: str,
        text: str,
        metadata: Mapping[str, str] | None,
        vector: Floats | None,
        among: Sequence[str] | None,
    ) -> list[Candidate]:
        if not prompt.strip():
            raise ConfigError("the prompt is empty: there is nothing to route")
        for name in among or ():
            self._check(name)
        names = list(snapshot.names if among is None else among)
        if vector is None and snapshot.reads_prompts:
            vector = embed_prompts(self.embedder, [text], [tags_of("", metadata or {})])[0]
        return self._candidates(snapshot, len(prompt), vector, names)

    def _said(self, decision: RouteDecision, text: str) -> RouteDecision:
        """Say it where a text was not read whole."""
        share = self.embedder.share_read(text)
        if share >= 1.0:
            return decision
        reason = decision.reason
        if share < 0.5:
            reason += f"; only {share:.0%} of the text was read: give the question alone"
        return replace(decision, reason=reason, share_read=share)

    def _candidates(
        self, snapshot: Snapshot, length: int, vector: Floats | None, names: Sequence[str]
    ) -> list[Candidate]:
        row = np.zeros(0, np.float32) if vector is None else np.asarray(vector, np.float32)
        cooldowns = self.options.cooldowns
        allowed = set(names if cooldowns is None else cooldowns.available(list(names)))
        with _MULTIPLYING:
            e = snapshot.bank.ask(row, level=self.options.interval)
            costs = snapshot.costs.ask(length, row)
        spread = np.sqrt(e.logits.variance)
        raw = []
        for name in names:
            i = snapshot.line.get(name)
            if i is None:
                continue
            health = "healthy" if cooldowns is None else cooldowns.state(name)
            raw.append(
                Candidate(
                    model=name,
                    mean=float(e.mean[i]),
                    low=float(e.low[i]),
                    high=float(e.high[i]),
                    cost_usd=_known(costs.expected_usd[i]),
                    cost_high_usd=_known(costs.high_usd[i]),
                    effective_n=float(e.effective_n[i]),
                    coverage=e.coverage[i],
                    weights=snapshot.bank.weights(i),
                    logit_mean=float(e.logits.mean[i]),
                    logit_sd=float(spread[i]),
                    state=health if name in allowed else "cooling",
                )
            )
        others = {c.model: c for c in raw}
        return [self._judged(c, others) for c in raw]

    def _judged(self, raw: Candidate, others: Mapping[str, Candidate]) -> Candidate:
        qualifies, utility, note = self.rule.judge(raw, others)
        # Nobody else has seen it yet, and a copy costs as much as the estimate.
        for name, value in (("qualifies", qualifies), ("utility", utility), ("note", note)):
            object.__setattr__(raw, name, value)
        return raw

    @property
    def explored_usd(self) -> float:
        """Extra expected dollars spent on exploration so far."""
        return self._explorer.spent_usd


def _read(prompt: str, question: str | None) -> str:
    return question if question and question.strip() else prompt


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
