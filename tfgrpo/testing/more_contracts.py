"""The contracts of allocators, recorders, generators, search environments and algorithms as checks.

Plain functions that raise `AssertionError` with the broken line of the contract, as in
`contracts`. They know the shape of what they check and not its room. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfgrpo.protocols import Allocator, Generator, Recorder, Sampling
from tfgrpo.rollout import Rollout, RolloutGroup, Task
from tfgrpo.runtime.canonical import canonical_json
from tfgrpo.testing.contracts import _require

__all__ = [
    "check_algorithm",
    "check_allocator",
    "check_environment",
    "check_generator",
    "check_recorder",
]

_EFFECTS = ("pure", "read", "idempotent", "reversible", "irreversible")


def check_allocator(
    allocator: Allocator,
    tasks: Sequence[Task],
    history: Sequence[RolloutGroup] = (),
    budgets: Sequence[int] = (0, 1, 7, 64),
) -> None:
    """Check an allocator: whole shares, one a task, within the budget, and no memory of the call.

    Raises:
        AssertionError: a line of the contract does not hold.
    """
    for budget in budgets:
        given = allocator(tasks, history, budget)
        _require(len(given) == len(tasks), f"{len(given)} shares for {len(tasks)} tasks")
        _require(
            all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in given),
            f"shares must be whole numbers of 0 or more: {list(given)!r:.200}",
        )
        _require(sum(given) <= budget, f"{sum(given)} rollouts for a budget of {budget}")
        again = allocator(tasks, history, budget)
        _require(list(again) == list(given), "equal calls gave different shares: a side effect")


def check_recorder(recorder: Recorder, group: RolloutGroup, verifier_id: str = "v") -> None:
    """Check a recorder with a group of graded rollouts: what is kept is found, and as graded.

    Raises:
        AssertionError: a line of the contract does not hold.
    """
    for rollout in group.rollouts:
        before = recorder.find_rollout(rollout.rollout_id, verifier_id)
        _require(before is None, "a rollout is found before it was kept")
    for _ in range(2):  # what is kept twice is kept
        for rollout in group.rollouts:
            recorder.record_rollout(rollout, group_id=group.group_id, verifier_id=verifier_id)
    recorder.record_group(group)
    for rollout in group.rollouts:
        found = recorder.find_rollout(rollout.rollout_id, verifier_id)
        _require(_same(found, rollout), f"rollout {rollout.rollout_id!r} is not found as kept")
        other = recorder.find_rollout(rollout.rollout_id, verifier_id + " of another kind")
        _require(
            other is None or other.score is None, "another verifier's score is given as this one's"
        )


def _same(found: Rollout | None, kept: Rollout) -> bool:
    return found is not None and canonical_json(found.to_dict()) == canonical_json(kept.to_dict())


def check_generator(
    generator: Generator, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None
) -> None:
    """Check a generator with at least two prompts: shapes, and rows that depend on no batch.

    Raises:
        AssertionError: a line of the contract does not hold.
    """
    sampling = sampling or Sampling(temperature=1.0, max_tokens=4)
    seeds = [[7 * p + i for i in range(2)] for p in range(len(prompts))]
    together = generator.generate(prompts, 2, sampling, seeds)
    _require(len(together) == len(prompts), "1: not one list a prompt")
    _require(all(len(rows) == 2 for rows in together), "1: not n continuations a prompt")
    for row in (r for rows in together for r in rows):
        _require(len(row.token_ids) == len(row.logprobs), "a log-probability a token is wanted")
        _require(all(p <= 0.0 for p in row.logprobs), "a log-probability is above 0")
        _require(row.finish in ("stop", "length"), f"finish is {row.finish!r}")
        _require(
            sampling.max_tokens is None or len(row.token_ids) <= sampling.max_tokens,
            "more tokens than asked for",
        )
    for place, prompt in enumerate(prompts):
        (alone,) = generator.generate([prompt], 2, sampling, [seeds[place]])
        for one, many in zip(alone, together[place], strict=True):
            _require(one.token_ids == many.token_ids, "2: a row depends on its batch")


async def check_environment(environment: Any, actions: Sequence[Any]) -> None:
    """Check a search environment: equal starts, steps that leave their state alone, failures as
    outcomes.

    Args:
        environment: `start`, `apply`, `fork`, `release`, `key`, `effects`, `is_simulator`.
        actions: some that can be tried from the start.

    Raises:
        AssertionError: a line of the contract does not hold.
    """
    start = await environment.start()
    key = environment.key(start)
    _require(key == environment.key(await environment.start()), "two starts differ")
    _require(isinstance(environment.is_simulator, bool), "is_simulator must be a bool")
    for action in (*actions, {"name": "no such action", "arguments": {}}):
        _require(environment.effects(action) in _EFFECTS, "effects must name a known class")
        first = await environment.apply(environment.fork(start), action)
        _require(isinstance(first.observation, str), "an observation must be text")
        _require(environment.key(start) == key, f"{action!r:.80} changed the state it was given")
        second = await environment.apply(environment.fork(start), action)
        same = (first.state_key, first.error, first.is_terminal)
        _require(
            same == (second.state_key, second.error, second.is_terminal),
            f"{action!r:.80} from one state gave two outcomes",
        )
    environment.release(start)


def check_algorithm(make: Callable[[], Any], grow: Callable[[Any], Any]) -> None:
    """Check a search algorithm: equal trees for equal searches, and a state that can be restored.

    Args:
        make: gives a fresh algorithm.
        grow: searches with an algorithm and returns the tree.

    Raises:
        AssertionError: a line of the contract does not hold.
    """
    algorithm = make()
    tree, again = grow(algorithm), grow(make())
    _require(_shape(tree) == _shape(again), "two equal searches grew two trees")
    _require(algorithm.best(tree) < len(tree.places), "best is no node of the tree")
    _require(isinstance(algorithm.finished(tree), str), "finished must give a text")
    state = algorithm.dump()
    canonical_json(state)
    _require(isinstance(state, Mapping), "dump must give an object")
    restored = make()
    restored.load(tree, state)
    _require(restored.best(tree) == algorithm.best(tree), "a restored algorithm has another best")
    _require(canonical_json(restored.dump()) == canonical_json(state), "what was restored differs")


def _shape(tree: Any) -> list[Any]:
    return [(n.id, n.parent, n.action_key, n.status) for n in tree]
