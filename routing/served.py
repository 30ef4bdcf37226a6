"""States of all models, made once, swapped whole, kept up to date behind the answers.

A `Snapshot` never changes: whoever holds one can ask it, whatever is recorded meanwhile. The keeper
builds the first one once, however many threads ask, who wait for it or are answered by success
rates until it is there; later it works a few new outcomes in at once (one row each, no refit) and
refits in a thread of its own, at most once in `every_s`.
Does not know rules, sessions or files. Source: own.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tfgrpo.routing.costs import CostBank, CostModel
from tfgrpo.routing.estimator.bank import Bank, Scores
from tfgrpo.routing.estimator.compact import Compact, compact, with_outcome
from tfgrpo.routing.estimator.coverage import far_floor, text_width
from tfgrpo.routing.estimator.rates import RateBank
from tfgrpo.routing.estimator.value_model import ValueModel
from tfgrpo.routing.history import Ground, History
from tfgrpo.routing.records import ModelInfo, SuccessCount

__all__ = ["First", "Refit", "Saved", "Snapshot", "StateKeeper"]

Refit = Literal["wait", "background"]
"""`wait`: an ask sees everything recorded before it. `background`: only the first ask waits."""
First = Literal["wait", "rates"]
"""What asks get before the first states are there: `wait` for them, or success `rates` at once."""

QUICK = 8
"""New outcomes of a model that are worked in at once; more wait for the refit."""

log = logging.getLogger(__name__)

_AT_WORK: weakref.WeakSet[StateKeeper] = weakref.WeakSet()
"""Keepers whose worker was started: a thread in the middle of a fit would abort the interpreter's
end, so they are ended first."""


@atexit.register
def _end_workers() -> None:
    for keeper in list(_AT_WORK):
        keeper.close()


@dataclass(frozen=True)
class Snapshot:
    """What is asked: a bank, costs, and which outcomes they know."""

    names: tuple[str, ...]
    bank: Bank | RateBank
    costs: CostBank
    version: int
    line: Mapping[str, int]
    """Model to its place in the bank."""

    @property
    def reads_prompts(self) -> bool:
        """False while only success rates are known."""
        return isinstance(self.bank, Bank)


@dataclass
class Saved:
    """States and outcomes as they are stored: what a keeper starts from, or writes."""

    ground: Ground
    histories: dict[str, History]
    states: dict[str, Compact]
    costs: dict[str, CostModel]
    scores: Scores
    floor: float


@dataclass
class _Model:
    info: ModelInfo
    history: History = field(default_factory=History)
    state: Compact | None = None
    costs: CostModel | None = None
    fresh: list[tuple[int, SuccessCount]] = field(default_factory=list)
    """Outcomes since `state` was fitted or updated."""
    total: tuple[float, float] = (0.0, 0.0)
    """Successes and trials of all that was recorded."""


def _mean_cost(model: _Model) -> CostModel:
    """What an answer costs on average, where that was fitted once."""
    known = model.costs
    one = np.zeros(1)
    if known is None or known.coefficients is None:
        in_dollars = model.info.output_usd_per_mtok is None
        return CostModel(model.info, in_dollars, None, one, 0.0, 0.0)
    return CostModel(model.info, known.in_dollars, one, one, known.level, known.spread)


class StateKeeper:
    """Outcomes in, snapshots out; safe between threads."""

    def __init__(
        self,
        value: Callable[[], ValueModel],
        models: Sequence[ModelInfo],
        *,
        refit: Refit = "background",
        every_s: float = 1.0,
        first: First = "wait",
        warm_up: Callable[[], object] = lambda: None,
    ) -> None:
        """Start with models that have no outcomes.

        Args:
            value: called when a state is fitted.
            models: who can be asked about.
            refit: whether asks wait for new outcomes.
            every_s: least seconds between two refits in the background.
            first: what asks get before the first states are there.
            warm_up: called in the background before the first states answer, where `first` does not
                wait: loads what else an ask needs.
        """
        self._value, self._refit, self._every_s = value, refit, every_s
        self._first, self._warm_up = first, warm_up
        self._warm = threading.Event()
        self._lock = threading.RLock()
        self._building = threading.Lock()
        self._models = {m.name: _Model(m) for m in models}
        self._waiting: list[SuccessCount] = []
        self._ground: Ground | None = None
        self._scores: Scores | None = None
        self._floor: float | None = None
        self._snapshot: Snapshot | None = None
        self._version = 0
        self._stop, self._dirty = threading.Event(), threading.Event()
        self._worker: threading.Thread | None = None
        self.states_built = 0
        """Full fits so far."""

    def restore(self, saved: Saved) -> None:
        """Take over stored outcomes and states; nothing is fitted again."""
        with self._lock:
            self._ground, self._scores, self._floor = saved.ground, saved.scores, saved.floor
            for name, model in self._models.items():
                model.history = saved.histories.get(name, History())
                model.total = model.history.total()
                model.state, model.costs = saved.states.get(name), saved.costs.get(name)
            if all(m.state is not None for m in self._models.values()):
                self._swap()
            if self._first == "rates":
                self._wake()

    def saved(self) -> Saved:
        """Return outcomes and states to be stored, all fitted to all outcomes."""
        if self._models:
            self.snapshot(wait=True)
        with self._building, self._lock:
            if self._ground is None:
                self._ground = Ground(self._value().embedder.width)
            self._prepare()
            assert self._scores is not None and self._floor is not None
            models = self._models.items()
            return Saved(
                self._ground,
                {n: History(m.history.merged(self._ground.keys)) for n, m in models},
                {n: m.state for n, m in models if m.state is not None},
                {n: m.costs for n, m in models if m.costs is not None},
                self._scores,
                self._floor,
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The models, in the order they were added."""
        return tuple(self._models)

    def info(self, name: str) -> ModelInfo:
        """Return what is known of a model besides its outcomes; KeyError without one."""
        return self._models[name].info

    def rates(self) -> dict[str, float]:
        """Return each model's success rate, with one success and one failure added."""
        return {name: (k + 1) / (n + 2) for name, (k, n) in self._totals().items()}

    def _totals(self) -> dict[str, tuple[float, float]]:
        """Successes and trials of each model, those included that wait to be embedded."""
        with self._lock:
            return {name: model.total for name, model in self._models.items()}

    def add(self, info: ModelInfo) -> None:
        """Add a model, or change its prices."""
        with self._lock:
            known = self._models.setdefault(info.name, _Model(info))
            known.info, known.costs = info, None
            self._touch()

    def record(self, outcomes: Sequence[SuccessCount]) -> None:
        """Take outcomes of known models."""
        with self._lock:
            self._waiting += outcomes
            for o in outcomes:
                model = self._models[o.model]
                model.total = model.total[0] + o.successes, model.total[1] + o.trials
            self._touch()

    def _touch(self) -> None:
        self._version += 1
        known = self._snapshot is not None and self._refit == "background"
        if known or (self._first == "rates" and not self._warm.is_set()):
            self._wake()

    def snapshot(self, *, wait: bool = False) -> Snapshot:
        """Return the newest snapshot; with `wait`, one that is fitted to every outcome."""
        if self._first == "rates" and not wait and not self._warm.is_set():
            with self._lock:
                self._wake()
            return self._by_rates()
        now = self._snapshot
        if now is not None and not wait and self._refit == "background":
            return now
        if now is not None and now.version == self._version and not (wait and self._is_quick()):
            return now
        with self._building:
            now = self._snapshot
            if now is None or now.version != self._version or self._is_quick():
                self._build("all")
            assert self._snapshot is not None
            return self._snapshot

    def _by_rates(self) -> Snapshot:
        """A snapshot of success rates: what is known without reading a prompt."""
        totals = self._totals()
        costs = [_mean_cost(self._models[name]) for name in totals]
        return Snapshot(
            tuple(totals), RateBank(list(totals.values())), CostBank(costs), -1,
            {name: i for i, name in enumerate(totals)},
        )  # fmt: skip

    def _is_quick(self) -> bool:
        return any(m.state is not None and m.state.n_updates for m in self._models.values())

    def _take_in(self) -> int:
        """Move waiting outcomes to the histories; return the version that they make."""
        with self._lock:
            version, waiting = self._version, self._waiting
            self._waiting = []
            ground = self._ground
        if ground is None:
            ground = self._ground = Ground(self._value().embedder.width)
        rows = ground.add(waiting, self._value().embedder) if waiting else []
        for row, o in zip(rows, waiting, strict=True):
            model = self._models[o.model]
            model.history.add([row], [o])
            model.fresh.append((row, o))
        return version

    def _build(self, how: Literal["quick", "due", "all"], *, behind: bool = False) -> None:
        """Bring the states up to date and swap the snapshot; called under `_building`.

        `behind` the answers it ends when the keeper is closed.

        `quick` refits nothing that can be worked in or can wait, `due` what has many outcomes that
        are not fitted, `all` everything that is not fitted to every outcome.
        """
        version = self._take_in()
        self._prepare()
        for name, model in list(self._models.items()):
            if behind and self._stop.is_set():
                return
            if model.state is None or (how == "all" and (model.fresh or model.state.n_updates)):
                self._fit(name, model)
            elif model.fresh and len(model.fresh) <= QUICK:
                self._work_in(model)
            if how == "due" and model.state is not None:
                many = model.state.n_updates > max(QUICK, model.state.n_rows // 20)
                if model.fresh or many:
                    self._fit(name, model)
        self._swap(version)

    def _prepare(self) -> None:
        """What all states share: scores of the reference models, and what far means."""
        assert self._ground is not None
        if self._scores is None:
            pool = self._value().pool
            self._scores = Scores(
                pool.coefficients.astype(np.float32),
                pool.intercepts.astype(np.float32),
                text_width(self._value().embedder),
            )
        if self._floor is None:
            self._floor = far_floor(self._value().embedder, self._ground.vectors)

    def _work_in(self, model: _Model) -> None:
        assert self._ground is not None and self._scores is not None
        for row, o in model.fresh:
            assert model.state is not None
            bank = Bank([model.state], self._ground.vectors, self._scores)
            model.state = with_outcome(model.state, bank.outcome(0, row, o.successes, o.trials))
        model.fresh = []

    def _fit(self, name: str, model: _Model) -> None:
        assert self._ground is not None and self._floor is not None
        value, ground = self._value(), self._ground
        merged = model.history.merged(ground.keys)
        pool = value.pool
        members = np.array([j for j, n in enumerate(pool.model_names) if n != name], np.int32)
        if len(members) < pool.size:
            # A model never is its own reference.
            value = ValueModel(
                value.embedder, pool.of_models(members.tolist()), layers=value.layers,
                local_rows=value.local_rows,
            )  # fmt: skip
        state = value.state_of_counts(
            ground.vectors[merged.rows], merged.counts, merged.trials,
            keys=[ground.keys[i] for i in merged.rows], model=name,
        )  # fmt: skip
        model.state = compact(state, merged.rows, members, self._floor)
        model.fresh, model.costs = [], None
        self.states_built += 1
        self._fit_costs(model)

    def _fit_costs(self, model: _Model) -> None:
        assert self._ground is not None
        m = model.history.merged(self._ground.keys)
        model.costs = CostModel.of_arrays(
            model.info, self._ground.lengths[m.rows], m.tokens, m.dollars,
            self._ground.vectors[m.rows],
        )  # fmt: skip

    def _swap(self, version: int = 0) -> None:
        assert self._ground is not None and self._scores is not None
        with self._lock:
            ready = [(n, m) for n, m in self._models.items() if m.state is not None]
            for _, model in ready:
                if model.costs is None:
                    self._fit_costs(model)
            names = tuple(n for n, _ in ready)
            self._snapshot = Snapshot(
                names,
                Bank([m.state for _, m in ready if m.state], self._ground.vectors, self._scores),
                CostBank([m.costs for _, m in ready if m.costs]),
                version,
                {n: i for i, n in enumerate(names)},
            )

    def _wake(self) -> None:
        """Tell the worker, which is started at the first need; called under the lock."""
        self._dirty.set()
        if self._worker is None and not self._stop.is_set():
            self._worker = threading.Thread(
                target=self._work, name="tfgrpo-router-refit", daemon=True
            )
            _AT_WORK.add(self)
            self._worker.start()

    def _work(self) -> None:
        """Work in what is new at once, refit what is due after a pause, the rest when idle."""
        took = 0.0
        if self._first == "rates" and not self._warm.is_set():
            self._start_up()
        while not self._stop.is_set():
            idle = not self._dirty.wait(timeout=max(self._every_s, 4 * took))
            self._dirty.clear()
            began = time.monotonic()
            try:
                with self._building:
                    self._build("all" if idle else "quick", behind=True)
                if not idle:
                    self._stop.wait(max(self._every_s, 4 * took))
                    began = time.monotonic()
                    with self._building:
                        self._build("due", behind=True)
            except Exception:
                # The old snapshot goes on answering; the next outcome tries again.
                log.exception("the states could not be refitted; answers come from the old ones")
            took = time.monotonic() - began
            with self._lock:
                if idle and not self._dirty.is_set():
                    self._worker = None
                    return

    def _start_up(self) -> None:
        try:
            self._warm_up()
            if self._snapshot is None:
                with self._building:
                    self._build("all", behind=True)
        except Exception:
            # From here on an ask does it itself, and raises what is wrong.
            log.exception("the first states could not be made behind the answers")
        self._warm.set()

    def close(self) -> None:
        """End the worker; the last snapshot goes on answering."""
        self._stop.set()
        self._dirty.set()
        worker = self._worker
        if worker is not None:
            worker.join()
