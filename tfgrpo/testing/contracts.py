"""The contracts of `tfgrpo.protocols` as checks that run against any implementation.

Plain functions, most of them async: each raises `AssertionError` with the broken line of the
contract, so they work under any test runner, with `python -O` too. They call the thing under test
a handful of times. Do not know which implementation it is. Source: own.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.errors import ConfigError, ProviderError, VerifierError
from tfgrpo.hint_plan import Ask, HintPlan, PlannedGroup, Write, WriteResult
from tfgrpo.messages import Message
from tfgrpo.protocols import LM, Completion, HintScheduler, Policy, Request, Verifier
from tfgrpo.rollout import OUTCOMES, Rollout, RolloutGroup, Score, Task
from tfgrpo.runtime.canonical import canonical_json
from tfgrpo.runtime.thinking import split_thinking

_FINISHES = ("stop", "length", "tool_calls", "content_filter")


def _require(truth: bool, broken: str) -> None:
    if not truth:
        raise AssertionError(broken)


async def check_lm(
    lm: LM, *, request: Request | None = None, is_deterministic: bool = False, close: bool = True
) -> None:
    """Check an LM's contract; makes about 12 draws.

    Args:
        lm: what is checked.
        request: what to ask; a short question where None.
        is_deterministic: also require equal replies to equal (request, seed).
        close: also close it, twice.

    Raises:
        AssertionError: a line of the contract does not hold.
    """
    request = request or Request((Message("user", "Say one word."),))
    request = request.with_sampling(max_tokens=request.sampling.max_tokens or 8)
    _require(bool(lm.model_id) and isinstance(lm.model_id, str), "model_id must be a text")
    _require(isinstance(lm.prefers_n, bool), "prefers_n must be a bool")
    before = canonical_json(dict(lm.identity))
    for n in (1, 3):
        replies = await lm.complete(request, n, list(range(n)))
        _require(
            1 <= len(replies) <= n, f"1: asked for {n} draws, got {len(replies)}, not 1 to {n}"
        )
        _check_replies(replies)
    concurrent = await asyncio.gather(*(lm.complete(request, 1, [s]) for s in range(4)))
    _require(all(len(r) == 1 for r in concurrent), "5: concurrent calls lose replies")
    if is_deterministic:
        again = await lm.complete(request, 1, [2])
        _require(
            again[0].text == concurrent[2][0].text,
            f"2: equal request and seed gave {again[0].text!r} and {concurrent[2][0].text!r}",
        )
    await _check_cancel(lm, request)
    _require(
        canonical_json(dict(lm.identity)) == before, "6: identity changed without a new setting"
    )
    if close:
        await lm.aclose()
        await lm.aclose()


def _check_replies(replies: Sequence[Completion]) -> None:
    calls = sum(r.usage.calls for r in replies)
    _require(calls >= 1, f"the replies of one call report {calls} calls, not at least 1")
    for reply in replies:
        _require(isinstance(reply.text, str), f"text {reply.text!r} is not a string")
        _require(reply.finish in _FINISHES, f"finish {reply.finish!r} is not one of {_FINISHES}")
        _require(not split_thinking(reply.text)[1], "4: thinking stands in the text")
        if reply.logprobs is not None:
            _require(
                all(math.isfinite(p) and p <= 1e-6 for p in reply.logprobs),
                "log-probabilities must be finite and at most 0",
            )
            ids = reply.token_ids
            _require(
                ids is None or len(ids) == len(reply.logprobs),
                "token_ids and logprobs must have equal lengths",
            )
        for name in ("uncached_tokens", "text_tokens", "reasoning_tokens"):
            _require(getattr(reply.usage, name) >= 0, f"usage.{name} is negative")


async def _check_cancel(lm: LM, request: Request) -> None:
    task = asyncio.ensure_future(lm.complete(request, 1, [99]))
    await asyncio.sleep(0)
    task.cancel()
    try:
        await asyncio.wait_for(asyncio.shield(task), 10)
    except asyncio.CancelledError:
        pass
    except TimeoutError as exc:
        raise AssertionError("5: a cancelled call did not end within 10 s") from exc
    replies = await lm.complete(request, 1, [1])
    _require(len(replies) == 1, "5: after a cancelled call the next one fails")


async def check_lm_failure(lm: LM, request: Request | None = None) -> ProviderError:
    """Require that a call fails with a `ProviderError` and nothing else; returns it.

    Raises:
        AssertionError: the call succeeded, or something else was raised.
    """
    request = request or Request((Message("user", "Say one word."),))
    try:
        await lm.complete(request, 1, [0])
    except ProviderError as error:
        return error
    except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as exc:
        raise AssertionError(f"3: {type(exc).__name__} left complete(), not ProviderError") from exc
    raise AssertionError("3: the call did not fail")


async def check_policy(
    policy: Policy,
    task: Task | None = None,
    *,
    context: Context = EMPTY_CONTEXT,
    seed: int = 0,
) -> Rollout:
    """Check a policy's contract on one task; returns the attempt. Makes three attempts.

    Raises:
        AssertionError: a line of the contract does not hold.
    """
    task = task or Task("contract", "Say one word.")
    _require(bool(policy.policy_id), "policy_id must be a text")
    rollout = await _attempt(policy, task, context, seed)
    _require(rollout.task_id == task.task_id, "the rollout names another task")
    _require(rollout.outcome in OUTCOMES, f"outcome {rollout.outcome!r} is unknown")
    _require(
        rollout.score is None and rollout.outcome != "graded", "2: a policy never scores itself"
    )
    _require(
        rollout.outcome == "ungraded" or bool(rollout.error),
        f"1: outcome {rollout.outcome!r} without an error text",
    )
    _require(
        Rollout.from_dict(rollout.to_dict()).to_dict() == rollout.to_dict(),
        "the rollout does not survive its JSON form",
    )
    others = await asyncio.gather(
        *(_attempt(policy, task, context, s) for s in (seed + 1, seed + 2))
    )
    _require(all(o.task_id == task.task_id for o in others), "4: concurrent attempts mix up tasks")
    ids = {rollout.rollout_id, *(o.rollout_id for o in others)}
    _require(len(ids) == 3, "attempts of different seeds must have different rollout_ids")
    return rollout


async def _attempt(policy: Policy, task: Task, context: Context, seed: int) -> Rollout:
    try:
        made = await policy.attempt(task, context, seed)
    except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as exc:
        raise AssertionError(f"1: attempt raised {type(exc).__name__}: {exc}") from exc
    _require(isinstance(made, Rollout), f"1: attempt returned {type(made).__name__}, not Rollout")
    return made


async def check_verifier(
    verifier: Verifier,
    rollout: Rollout,
    task: Task,
    *,
    is_deterministic: bool = True,
) -> float:
    """Check a verifier's contract on one finished rollout; returns the reward.

    Raises:
        AssertionError: a line of the contract does not hold.
    """
    _require(bool(verifier.verifier_id), "verifier_id must be a text")
    low, high = verifier.reward_range
    _require(low < high, f"reward_range {low!r} to {high!r} is empty")
    before = (canonical_json(rollout.to_dict()), canonical_json(task.to_dict()))
    try:
        verifier.check_task(task)
    except ConfigError as exc:
        raise AssertionError(f"4: the given task was refused: {exc}") from exc
    try:
        score = await verifier.score(rollout, task)
    except VerifierError as exc:
        raise AssertionError(f"1: the given rollout could not be scored: {exc}") from exc
    _require(math.isfinite(score.reward), "1: the reward is not finite")
    _require(low <= score.reward <= high, f"reward {score.reward!r} is outside {low!r} to {high!r}")
    after = (canonical_json(rollout.to_dict()), canonical_json(task.to_dict()))
    _require(before == after, "2: the verifier changed the rollout or the task")
    if is_deterministic:
        again = await verifier.score(rollout, task)
        _require(again.reward == score.reward, "3: equal input, different reward")
    return score.reward


def check_scheduler(
    scheduler: HintScheduler,
    task: Task,
    *,
    rewards_of: Callable[[HintPlan], Sequence[float]] | None = None,
    replies: Callable[[Write], str] = lambda ask: "",
    group_size: int = 4,
    visits: int = 3,
) -> None:
    """Check a hint scheduler's contract on made-up rewards; it is changed by that.

    Args:
        scheduler: a fresh one.
        task: with whatever help the scheduler looks for.
        rewards_of: a plan to the rewards of its rollouts, at least as many as it asks for; None
            fails the bare task throughout and then succeeds once.
        replies: what the policy answers where it is asked for a text; nothing by default.
        group_size: rollouts of a plan that names no number.
        visits: visits of the task, an epoch each.

    Raises:
        AssertionError: a line of the contract does not hold.
    """
    rewards_of = rewards_of or (lambda plan: [float(not plan.is_bare), *[0.0] * (group_size - 1)])
    for visit in range(visits):
        before = canonical_json(scheduler.state_dict())
        made = _visit(scheduler, task, rewards_of, replies, group_size)
        _require(
            canonical_json(scheduler.state_dict()) == before, "start or after changed the state"
        )
        group = scheduler.accept(task, made)
        known = {r.rollout_id for one in made for r in one.group.rollouts}
        _require(bool(group.rollouts), "the accepted group is empty")
        _require(
            {r.rollout_id for r in group.rollouts} <= known,
            "the accepted group has rollouts that were not made in this visit",
        )
        state = json.loads(canonical_json(scheduler.state_dict()))
        scheduler.load_state_dict(state)
        _require(
            canonical_json(scheduler.state_dict()) == canonical_json(state),
            f"visit {visit + 1}: load_state_dict does not restore what state_dict gave",
        )
        _require(
            all(math.isfinite(v) for v in scheduler.figures().values()), "a figure is not finite"
        )
        scheduler.epoch_end()


def _visit(
    scheduler: HintScheduler,
    task: Task,
    rewards_of: Callable[[HintPlan], Sequence[float]],
    replies: Callable[[Write], str],
    group_size: int,
) -> list[PlannedGroup]:
    plans: list[Ask] = list(scheduler.start(task, group_size))
    _require(bool(plans), "start gave no plan: the bare task is a plan too")
    made: list[PlannedGroup] = []
    for _ in range(100):
        written: list[WriteResult] = []
        for plan in plans:
            if isinstance(plan, Write):
                written.append(WriteResult(plan.key, plan.read(replies(plan)), 1))
                continue
            part = plan.part()
            context = EMPTY_CONTEXT if part is None else EMPTY_CONTEXT.with_parts(part)
            rewards = rewards_of(plan)[: plan.n or group_size]
            rollouts = tuple(
                Rollout(f"{len(made)}-{i}", task.task_id, sample_index=i).graded(Score(r))
                for i, r in enumerate(rewards)
            )
            made.append(PlannedGroup(plan, RolloutGroup(f"{len(made)}", task, rollouts, context)))
        if written:
            made[-1] = replace(made[-1], written=(*made[-1].written, *written))
        plans = list(scheduler.after(task, made))
        if not plans:
            return made
    raise AssertionError("after asked for a hundred rounds of one visit: it must come to an end")
