"""Which prompts a step practises on, and how many rollouts each of them gets: one plan, told along.

    plan = Practice(size=8, probe=3)
    plan(tasks, history, budget)                    a probe of the prompts likeliest to be mixed
    plan.grow(tasks, history, groups, sizes, budget)    finish, stop, take new prompts

A group teaches when it is mixed. The same prompt at an earlier step is the strong predictor of
that, its text a weak one. A hopeless group is stopped after its probe; others are finished to a
size fixed beforehand, so that stopping does not bias the mean of what is kept; what was not spent
goes to new prompts. A floor of prompts is drawn at random, or what was once judged hopeless would
never be seen again. All functions are pure; whoever runs the rollouts keeps the state
(`tfgrpo.group_sizes`).
Does not know who samples, or the rewards' meaning beyond k successes of n.
Sources: dynamic sampling (DAPO, arXiv 2503.14476); everything after "until mixed" is own, see
`docs/routing.md` for what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.routing.budgets.posterior_gain import (
    GRID,
    PosteriorGain,
    check_budget,
    mixed_share,
    pool_weights,
    seen_counts,
)
from tfgrpo.routing.estimator.value_model import Estimates
from tfgrpo.routing.records import outcomes_of_groups

__all__ = ["Next", "Practice"]

Array = NDArray[np.float64]
Move = Literal["finish", "stop", "done"]


_RULE = PosteriorGain(max_seen=8.0)


@dataclass(frozen=True, slots=True)
class Next:
    """What to do with each open group."""

    moves: tuple[Move, ...]
    rollouts: tuple[int, ...]
    """Further rollouts of each group: up to the fixed size where it is finished, else 0."""

    @property
    def n_stopped(self) -> int:
        """Groups that end after their probe; as many new prompts may take their place."""
        return sum(m == "stop" for m in self.moves)


@dataclass(frozen=True, slots=True)
class Practice:
    """A plan for groups of a fixed size."""

    size: int = 8
    """Rollouts of a finished group."""
    probe: int = 3
    """Rollouts of every group before it is judged."""
    hope: float = 1.0
    """A group that is not mixed yet is finished where its chance of turning, a further rollout, is
    at least this many times that of a fresh group."""
    floor: float = 0.1
    """Share of the prompts that is drawn at random."""
    predict: Callable[[Sequence[Task]], Estimates] | None = None
    """Estimates from the prompts' texts, such as `state_predictor(state.predict)`."""
    rule: PosteriorGain = _RULE
    """Makes posteriors of success rates from history and estimates."""

    def __post_init__(self) -> None:
        if not 1 <= self.probe <= self.size:
            raise ConfigError(
                f"probe {self.probe} and size {self.size}: allowed is 1 ≤ probe ≤ size"
            )
        if not 0 <= self.floor <= 1 or not self.hope >= 0:
            raise ConfigError(
                f"floor {self.floor!r} and hope {self.hope!r}: allowed are 0 to 1, and 0 or more"
            )

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return a probe of as many tasks as the budget can finish, and 0 of the others."""
        check_budget(budget)
        n = min(len(tasks), budget // self.size)
        chosen = set(self.select(tasks, history, n, seed=len(history)))
        return [self.probe if i in chosen else 0 for i in range(len(tasks))]

    def grow(
        self,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        groups: Sequence[RolloutGroup],
        sizes: Sequence[int],
        budget: int,
    ) -> list[int]:
        """Return the sizes after a probe: finished groups, and probes of new tasks for what the
        stopped ones left. Only what can be finished is begun."""
        now, weights = list(sizes), self.posterior(tasks, history)
        line = {task.task_id: i for i, task in enumerate(tasks)}
        k, n = np.zeros(len(tasks)), np.zeros(len(tasks))
        for o in outcomes_of_groups(groups, success_at=self.rule.success_at):
            k[line[o.prompt_id]], n[line[o.prompt_id]] = o.successes, o.trials
        fresh = float((weights @ mixed_share(GRID, self.size)).mean()) / self.size
        open_ = [i for i, size in enumerate(now) if 0 < size < self.size]
        at = np.array(open_, dtype=np.intp)
        moves = self.judge(weights[at], k[at], n[at], fresh=fresh).moves if open_ else ()
        for i, move in zip(open_, moves, strict=True):
            now[i] = self.size if move == "finish" else now[i]
        unseen = np.array([i for i, size in enumerate(now) if not size], dtype=np.intp)
        room = min((budget - sum(now)) // self.size, len(unseen))
        if room > 0:
            chances = self.chances([tasks[i] for i in unseen], history)
            for i in self.select_by(chances, room, seed=len(history) + len(groups)):
                now[int(unseen[i])] = self.probe
        return now

    def posterior(self, tasks: Sequence[Task], history: Sequence[RolloutGroup]) -> Array:
        """Return weights over `posterior_gain.GRID` of each task's success rate, for `judge`."""
        k, n = self.rule.faded(*seen_counts(tasks, history, self.rule.success_at, self.rule.decay))
        estimates = None if self.predict is None or not tasks else self.predict(tasks)
        return self.rule.posterior(self._pool(history), k, n, estimates)

    def chances(self, tasks: Sequence[Task], history: Sequence[RolloutGroup]) -> Array:
        """Return each task's chance of a mixed group of the fixed size.

        A task that was seen goes by its own outcomes, another by its text: a predicted rate near
        one half says mixed. The text's word is scaled to the mean that the history has.
        """
        k, n = self.rule.faded(*seen_counts(tasks, history, self.rule.success_at, self.rule.decay))
        pool = self._pool(history)
        mixed = mixed_share(GRID, self.size)
        found = self.rule.posterior(pool, k, n, None) @ mixed
        if self.predict is not None and len(tasks):
            told = mixed_share(self.predict(tasks).mean, self.size)
            new = n == 0
            found[new] = np.minimum(told[new] * float(pool @ mixed) / max(told.mean(), 1e-9), 1.0)
        return np.asarray(found)

    def _pool(self, history: Sequence[RolloutGroup]) -> Array:
        rows = outcomes_of_groups(history, success_at=self.rule.success_at)
        return pool_weights(
            np.array([o.successes for o in rows]), np.array([o.trials for o in rows])
        )

    def select(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], n: int, *, seed: int = 0
    ) -> list[int]:
        """Return the indices of n tasks: likeliest mixed groups first, then the random floor.

        Raises:
            ConfigError: n is not between 0 and the number of tasks.
        """
        if not 0 <= n <= len(tasks):
            raise ConfigError(f"n is {n}: allowed is 0 to {len(tasks)}, the number of tasks")
        return self.select_by(self.chances(tasks, history), n, seed=seed)

    def select_by(self, chances: Array, n: int, *, seed: int = 0) -> list[int]:
        """Return the indices of the n largest chances, a share `floor` of them drawn at random."""
        rng = np.random.default_rng(seed)
        # Ties are dealt at random, not by the order of the tasks.
        order = np.lexsort((rng.random(len(chances)), -chances))
        n_random = min(round(self.floor * n), n)
        best = [int(i) for i in order[: n - n_random]]
        rest = rng.permutation(order[n - n_random :])
        return best + [int(i) for i in rest[:n_random]]

    def judge(self, weights: Array, k: Array, n: Array, *, fresh: float | None = None) -> Next:
        """Return what follows for open groups with k successes of n rollouts so far.

        `weights` is the posterior before these rollouts, a row a group; `fresh` the chance a
        rollout that a new group turns mixed (default: of these groups before their rollouts). A
        group without a graded rollout is stopped.
        """
        seen = weights * GRID ** k[:, None] * (1 - GRID) ** (n - k)[:, None]
        seen /= np.maximum(seen.sum(axis=1, keepdims=True), 1e-300)
        left = np.maximum(self.size - n, 0.0)
        same = np.where((k == n)[:, None], GRID, 1 - GRID) ** left[:, None]
        turns = 1 - (seen * same).sum(axis=1)
        mixed = (k > 0) & (k < n)
        if fresh is None:
            fresh = float((weights @ mixed_share(GRID, self.size)).mean()) / self.size
        moves: list[Move] = []
        for is_mixed, chance, seen_n, open_rollouts in zip(mixed, turns, n, left, strict=True):
            worth = self.hope * fresh * open_rollouts
            if open_rollouts <= 0:
                moves.append("done")
            else:
                hopeful = seen_n > 0 and (is_mixed or chance >= worth)
                moves.append("finish" if hopeful else "stop")
        more = [int(r) if m == "finish" else 0 for m, r in zip(moves, left, strict=True)]
        return Next(tuple(moves), tuple(more))

    def spread(self, weights: Array, k: Array, n: Array, budget: int) -> list[int]:
        """Return extra rollouts a group that lower the mean of p(1 − p)/n most.

        For estimates of every prompt's rate, where no prompt may be left out: greedy on the
        expected variance under a posterior that has seen k of n; n must be above 0.
        """
        check_budget(budget)
        seen = weights * GRID ** k[:, None] * (1 - GRID) ** (n - k)[:, None]
        seen /= np.maximum(seen.sum(axis=1, keepdims=True), 1e-300)
        variance = seen @ (GRID * (1 - GRID))
        step = np.arange(budget)
        gains = variance[:, None] / ((n[:, None] + step) * (n[:, None] + step + 1))
        order = np.argsort(-gains, axis=None, kind="stable")[:budget]
        return [int(c) for c in np.bincount(order // max(budget, 1), minlength=len(k))]
