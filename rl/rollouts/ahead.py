"""Rolls the groups of a step while the step before is trained: asynchronous by one update.

Groups drawn ahead are of the weights before that update and say so (`metadata["weights"]`, the
number of updates before). The update ends with the rollouts, and only then are new weights handed
over, so no rollout is of two versions and equal runs are equal. With `engine.max_staleness = 0` a
step's groups are rolled when it begins.

Does not know losses or how tokens are made. Idea: one step off the policy (verl, prime-rl, AReaL);
drained at each update, so that runs stay bit-equal (own).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self, runtime_checkable

from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.protocols import Generator
from tfgrpo.rl import distributed
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.rollouts.figures import RolloutFigures
from tfgrpo.rl.rollouts.step_groups import StepGroups, StepSampler
from tfgrpo.rl.rollouts.step_parts import RolloutMaker
from tfgrpo.rollout import Rollout, RolloutGroup

log = logging.getLogger(__name__)


@runtime_checkable
class Stoppable(Protocol):
    """A generator that can be told to begin no further draw."""

    def stop(self) -> None:
        """Begin no further draw until new weights come; whoever waits for one gets an error."""
        ...


@dataclass(frozen=True, slots=True)
class Rolled:
    """The groups of one step and what they cost."""

    step: int
    """From 0."""
    weights: int
    """Updates of the weights that sampled them."""
    groups: StepGroups
    spent: RolloutFigures
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; a group that is trained stands there once."""
        g = self.groups
        place = {id(group): i for i, group in enumerate(g.groups)}
        return {
            "step": self.step,
            "weights": self.weights,
            "groups": [group.to_dict() for group in g.groups],
            "made": [place[id(m)] if id(m) in place else m.to_dict() for m in g.made],
            "replayed": sorted(g.replayed),
            "is_graded": g.is_graded,
            "baselines": dict(g.baselines),
            "figures": g.figures,
            "spent": asdict(self.spent),
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Return what `to_json` wrote."""
        groups = [RolloutGroup.from_dict(g) for g in row["groups"]]
        made = [groups[m] if isinstance(m, int) else RolloutGroup.from_dict(m) for m in row["made"]]
        rolled = StepGroups(
            groups,
            made,
            frozenset(row["replayed"]),
            row["is_graded"],
            dict(row["baselines"]),
            dict(row["figures"]),
        )
        spent = RolloutFigures(**row["spent"])
        return cls(row["step"], row["weights"], rolled, spent, row["seconds"])


class RollsAhead:
    """Gives each step its groups.

    Args:
        config: all settings.
        sampler: makes a step's groups.
        maker: knows what they cost.
        engine: what samples while weights are trained; stopped with the step where it can be.

    Raises:
        ConfigError: sampling ahead with the trainer's own sampler or with a user's groups.
    """

    def __init__(
        self,
        config: TrainConfig,
        sampler: StepSampler,
        maker: RolloutMaker,
        engine: Generator | None,
        *,
        has_own_groups: bool = False,
    ) -> None:
        self.is_on = config.engine.max_staleness > 0
        if self.is_on and (engine is None or has_own_groups):
            raise ConfigError(
                "engine.max_staleness needs rollouts by an engine beside the trainer: pass "
                "TrainerParts(generator=…) without make_groups, or set engine.max_staleness = 0"
            )
        self._most = config.engine.max_staleness
        self._steps = config.optimiser.steps
        self._sampler = sampler
        self._maker = maker
        self._engine = engine
        self._group = distributed.further_group() if self.is_on else None
        self._drawn: Rolled | None = None
        self._is_broken = False
        self.weights = 0
        """Updates so far."""
        self.waited_s = 0.0
        """How long the last step's update waited for rollouts."""

    def take(self, step: int) -> Rolled:
        """Return the groups of a step: those drawn ahead, else they are rolled now.

        Raises:
            StoreError: rollouts were broken off before.
        """
        self._check_whole()
        drawn, self._drawn = self._drawn, None
        dropped = 0
        if drawn is not None and (drawn.step != step or self.weights - drawn.weights > self._most):
            dropped = len(drawn.groups.groups)
            log.warning(
                "step %d: %d groups drawn ahead are older than engine.max_staleness %d allows and "
                "are dropped", step + 1, dropped, self._most,
            )  # fmt: skip
            drawn = None
        self.waited_s = 0.0
        if drawn is None:
            drawn = self._roll(step)
            self.waited_s = drawn.seconds
        if self.is_on or dropped:
            self._note_age(drawn, dropped)
        return drawn

    def _note_age(self, drawn: Rolled, dropped: int) -> None:
        """Count how old the rollouts are, and mark those that older weights sampled."""
        groups, now = drawn.groups, self.weights
        rollouts = [r for g in groups.groups for r in g.rollouts]
        ages = [now - int(r.metadata.get("weights", drawn.weights)) for r in rollouts]
        groups.figures |= {
            "staleness": sum(ages) / max(1, len(ages)),
            "dropped_stale": dropped,
        }
        groups.replayed |= {
            r.rollout_id for r, age in zip(rollouts, ages, strict=True) if age and _is_sampled(r)
        }

    def _roll(self, step: int) -> Rolled:
        started = time.monotonic()
        groups = self._sampler.roll(step, self.weights if self.is_on else None)
        seconds = time.monotonic() - started
        return Rolled(step, self.weights, groups, self._maker.figures, seconds)

    @contextmanager
    def beside(self, step: int) -> Iterator[None]:
        """Roll the groups of a step while the block trains; wait for them at its end.

        An error on either side ends both.
        """
        if not self.is_on or step >= self._steps:
            yield
            return
        pool = ThreadPoolExecutor(1, "rollouts")
        try:
            future = pool.submit(self._roll_apart, step)
            yield
            self._drawn = self._waited_for(future)
        except BaseException:
            self._is_broken = True
            if isinstance(self._engine, Stoppable):
                self._engine.stop()
            raise
        finally:
            pool.shutdown()  # waits, whatever happened

    def _roll_apart(self, step: int) -> Rolled:
        with distributed.gathering_over(self._group):
            rolled = self._roll(step)
            distributed.gather_objects(None)  # one process hands over weights, when all have drawn
            return rolled

    def _waited_for(self, future: Future[Rolled]) -> Rolled:
        started = time.monotonic()
        found = future.result()
        self.waited_s += time.monotonic() - started
        return found

    def _check_whole(self) -> None:
        if self._is_broken:
            raise StoreError(
                "rollouts were broken off, so the run's state is that of no step: resume from its "
                "last checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON, with the groups of every process.

        Raises:
            StoreError: rollouts were broken off before.
        """
        self._check_whole()
        mine = None if self._drawn is None else self._drawn.to_json()
        return {"weights": self.weights, "drawn": distributed.gather_objects(mine)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.weights = int(state["weights"])
        row = state["drawn"][distributed.world()[0]]
        self._drawn = None if row is None else Rolled.from_json(row)
        self._is_broken = False


def _is_sampled(rollout: Rollout) -> bool:
    """False for a reply that was given: it is as old as any weights."""
    return any(step.logprobs is not None for step in rollout.steps)
