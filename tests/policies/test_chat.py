"""Chat and function policies: outcomes, identity, short answers, cancellation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tfgrpo.context import EMPTY_CONTEXT, Context, ContextPart
from tfgrpo.errors import BudgetError, ConfigError, ProviderError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.policies.chat import ChatPolicy, FunctionPolicy
from tfgrpo.protocols import Completion, GroupPolicy, Limits, Request, Sampling
from tfgrpo.rollout import Rollout, Score, Step, Task, Usage
from tfgrpo.runtime.call_scope import CallScope, call_scope, current_scope

TASK = Task("t1", "2+2?", reference="SECRET-REFERENCE", metadata={"hidden": "SECRET-METADATA"})


class GroupLM(ScriptedLM):
    """Answers at most `most` draws a call, with the seed as text."""

    prefers_n = True  # type: ignore[assignment]

    def __init__(self, most: int, fail_after: int = 10**9, kind: str = "overloaded") -> None:
        super().__init__(lambda request, seed: f"reply {seed}")
        self.most, self.fail_after, self.kind = most, fail_after, kind
        self.asked: list[tuple[int, int]] = []

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        if len(self.asked) >= self.fail_after:
            raise ProviderError("down", kind=self.kind)  # type: ignore[arg-type]
        self.asked.append((n, current_scope().sample_index))
        return await super().complete(request, min(n, self.most), seeds)


async def test_a_finished_attempt_is_ungraded_and_keeps_tokens_and_usage() -> None:
    reply = Completion(
        "4",
        reasoning="two and two",
        token_ids=(7,),
        logprobs=(-0.5,),
        prompt_token_ids=(1, 2),
        usage=Usage(uncached_tokens=3, text_tokens=1, calls=1),
    )
    done = await ChatPolicy(ScriptedLM(lambda r, s: reply)).attempt(TASK, EMPTY_CONTEXT, 5)
    assert (done.outcome, done.answer, done.seed, done.is_truncated) == ("ungraded", "4", 5, False)
    assert done.steps[0].token_ids == (7,) and done.steps[0].logprobs == (-0.5,)
    assert done.steps[0].prompt_token_ids == (1, 2)
    assert done.steps[0].action.reasoning == "two and two"
    assert done.usage == reply.usage


async def test_the_prompt_is_the_rendered_context_without_reference_or_metadata() -> None:
    lm = ScriptedLM("ok")
    context = Context((ContextPart("lesson", "Count on fingers {x} %s"),))
    await ChatPolicy(lm, system="Be brief.").attempt(TASK, context, 0)
    sent = lm.requests[0]
    assert sent.messages[0].content.startswith("Be brief.\n\n")
    assert "Count on fingers {x} %s" in sent.messages[0].content
    assert sent.messages[1] == Message("user", "2+2?")
    assert "SECRET" not in repr(sent)


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("refused", "refused"),
        ("timeout", "timed_out"),
        ("auth", "provider_failed"),
        ("not_found", "provider_failed"),
        ("quota", "provider_failed"),
        ("rate_limit", "provider_failed"),
        ("overloaded", "provider_failed"),
        ("connection", "provider_failed"),
        ("context_too_long", "provider_failed"),
        ("bad_request", "provider_failed"),
        ("bad_reply", "provider_failed"),
    ],
)
async def test_a_failed_call_is_an_outcome_that_names_its_kind(kind: Any, outcome: str) -> None:
    lm = ScriptedLM([ProviderError("no\nluck", kind=kind)])
    done = await ChatPolicy(lm).attempt(TASK, EMPTY_CONTEXT, 0)
    assert done.outcome == outcome and done.reward is None
    assert done.metadata["provider_kind"] == kind
    assert done.error == "no luck" and done.usage.calls == 1


async def test_a_content_filter_is_a_refusal_and_a_cut_reply_is_flagged() -> None:
    blocked = ChatPolicy(ScriptedLM([Completion("I", finish="content_filter")]))
    assert (await blocked.attempt(TASK, EMPTY_CONTEXT, 0)).outcome == "refused"
    cut = await ChatPolicy(ScriptedLM([Completion("4 is", finish="length")])).attempt(
        TASK, EMPTY_CONTEXT, 0
    )
    assert cut.is_truncated and cut.outcome == "ungraded"


async def test_a_foreign_exception_of_an_lm_is_a_failed_policy() -> None:
    def broken(request: Request, seed: int | None) -> str:
        raise KeyError("x")

    done = await ChatPolicy(ScriptedLM(broken)).attempt(TASK, EMPTY_CONTEXT, 0)
    assert done.outcome == "policy_failed" and "KeyError" in done.error


async def test_a_spent_budget_is_not_an_attempt_and_passes_through() -> None:
    def spent(request: Request, seed: int | None) -> str:
        raise BudgetError("cap", resource="cost_usd")

    policy = ChatPolicy(ScriptedLM(spent))
    with pytest.raises(BudgetError):
        await policy.attempt(TASK, EMPTY_CONTEXT, 0)
    with pytest.raises(BudgetError):
        await policy.attempt_group(TASK, EMPTY_CONTEXT, [1, 2, 3])


async def test_a_short_answer_is_asked_for_again_under_the_missing_indices() -> None:
    lm = GroupLM(most=3)
    with call_scope(CallScope(sample_index=10)):
        group = await ChatPolicy(lm).attempt_group(TASK, EMPTY_CONTEXT, list(range(8)))
    assert lm.asked == [(8, 10), (5, 13), (2, 16)]
    assert [r.answer for r in group] == [f"reply {i}" for i in range(8)]
    assert [r.sample_index for r in group] == list(range(10, 18))
    assert len({r.rollout_id for r in group}) == 8


async def test_what_was_paid_before_a_failure_stays_good() -> None:
    lm = GroupLM(most=3, fail_after=1)
    group = await ChatPolicy(lm).attempt_group(TASK, EMPTY_CONTEXT, list(range(5)))
    assert [r.outcome for r in group] == ["ungraded"] * 3 + ["provider_failed"] * 2
    assert sum(r.usage.calls for r in group[3:]) == 1


async def test_an_empty_answer_ends_as_a_bad_reply_and_not_in_a_loop() -> None:
    group = await ChatPolicy(GroupLM(most=0)).attempt_group(TASK, EMPTY_CONTEXT, [1, 2])
    assert [r.metadata["provider_kind"] for r in group] == ["bad_reply"] * 2


async def test_without_n_a_group_is_one_call_a_draw_in_order() -> None:
    lm = ScriptedLM(lambda request, seed: f"reply {seed}")
    policy = ChatPolicy(lm)
    assert isinstance(policy, GroupPolicy) and not policy.prefers_groups
    group = await policy.attempt_group(TASK, EMPTY_CONTEXT, [3, 1, 2])
    assert [r.answer for r in group] == ["reply 3", "reply 1", "reply 2"]
    assert len(lm.requests) == 3


async def test_cancelling_a_group_leaves_no_task_running() -> None:
    lm = ScriptedLM("late", latency_s=30)
    running = asyncio.create_task(ChatPolicy(lm).attempt_group(TASK, EMPTY_CONTEXT, [1, 2, 3]))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []


def test_the_id_changes_exactly_when_the_policy_could_act_otherwise() -> None:
    base = ChatPolicy(ScriptedLM("a"))
    same = [
        ChatPolicy(ScriptedLM("a")),
        ChatPolicy(ScriptedLM("a"), limits=Limits(timeout_s=1)),
        ChatPolicy(ScriptedLM("a"), sampling=Sampling()),
    ]
    other = [
        ChatPolicy(ScriptedLM("a", model_id="scripted:b")),
        ChatPolicy(ScriptedLM("a"), system="x"),
        *(
            ChatPolicy(ScriptedLM("a"), sampling=s)
            for s in (
                Sampling(temperature=0.5),
                Sampling(top_p=0.5),
                Sampling(max_tokens=5),
                Sampling(stop=("x",)),
                Sampling(reasoning_effort="low"),
                Sampling(extra={"top_k": 5}),
            )
        ),
    ]
    assert {p.policy_id for p in same} == {base.policy_id}
    assert len({p.policy_id for p in [base, *other]}) == len(other) + 1


@pytest.mark.parametrize(
    "wrong",
    [
        Sampling(temperature=-1),
        Sampling(top_p=0.0),
        Sampling(max_tokens=0),
        Sampling(top_logprobs=21),
    ],
)
def test_impossible_sampling_is_refused_before_any_call(wrong: Sampling) -> None:
    with pytest.raises(ConfigError, match="ChatPolicy"):
        ChatPolicy(ScriptedLM("a"), sampling=wrong)


# --- functions ------------------------------------------------------------------------------


def function(fn: Any, **kwargs: Any) -> FunctionPolicy:
    return FunctionPolicy(fn, policy_id="mine-1", **kwargs)


async def test_every_allowed_result_of_a_function_becomes_an_attempt() -> None:
    step = Step(Message("assistant", "4"), (Message("tool", "ok"),))
    for made in ("4", Message("assistant", "4"), [step], (step,), Rollout("x", "other", (step,))):
        done = await function(lambda prompt, context, made=made: made).attempt(
            TASK, EMPTY_CONTEXT, 3
        )
        assert (done.outcome, done.answer, done.task_id, done.seed) == ("ungraded", "4", "t1", 3)


async def test_a_function_gets_text_or_turns_context_and_seed_but_never_the_reference() -> None:
    seen: list[Any] = []

    async def mine(prompt: Any, context: Context, *, seed: int) -> str:
        seen.append((prompt, context, seed))
        return "4"

    turns = (Message("system", "s"), Message("user", "u"))
    await function(mine).attempt(TASK, EMPTY_CONTEXT, 9)
    await function(mine).attempt(replace(TASK, prompt=turns), EMPTY_CONTEXT, 9)
    assert seen == [("2+2?", EMPTY_CONTEXT, 9), (turns, EMPTY_CONTEXT, 9)]
    assert "SECRET" not in repr(seen)


async def test_a_synchronous_function_runs_in_a_thread_under_the_scope_of_its_rollout() -> None:
    def mine(prompt: str, context: Context) -> str:
        return f"{threading.current_thread() is threading.main_thread()} {current_scope().task_id}"

    with call_scope(CallScope(task_id="t1")):
        done = await function(mine).attempt(TASK, EMPTY_CONTEXT, 0)
    assert done.answer == "False t1"


@pytest.mark.parametrize(
    ("raised", "outcome", "text"),
    [
        (ValueError("bad\nthing"), "policy_failed", "ValueError: bad thing"),
        (StopIteration("x"), "policy_failed", "StopIteration"),
        (SystemExit(3), "policy_failed", "SystemExit: 3"),
        (TimeoutError("socket"), "policy_failed", "TimeoutError: socket"),
        (ProviderError("key", kind="auth"), "provider_failed", "key"),
        (ProviderError("no", kind="refused"), "refused", "no"),
    ],
)
async def test_what_a_function_raises_is_an_outcome(
    raised: BaseException, outcome: str, text: str
) -> None:
    def mine(prompt: str, context: Context) -> str:
        raise raised

    done = await function(mine).attempt(TASK, EMPTY_CONTEXT, 0)
    assert done.outcome == outcome and text in done.error


async def test_a_function_that_scores_itself_or_returns_anything_else_has_failed() -> None:
    graded = Rollout("x", "t1", outcome="graded", score=Score(1.0))
    for made in (graded, None, 4, b"4", ["4"], {"answer": 4}):
        done = await function(lambda prompt, context, made=made: made).attempt(
            TASK, EMPTY_CONTEXT, 0
        )
        assert done.outcome == "policy_failed" and "returned" in done.error


async def test_a_function_past_its_time_has_timed_out() -> None:
    async def slow(prompt: str, context: Context) -> str:
        await asyncio.sleep(30)
        return "late"

    release = threading.Event()

    def blocking(prompt: str, context: Context) -> str:
        release.wait(5)
        return "late"

    for fn in (slow, blocking):
        done = await function(fn, timeout_s=0.02).attempt(TASK, EMPTY_CONTEXT, 0)
        assert done.outcome == "timed_out" and "0.02 s" in done.error
    release.set()


async def test_a_blocking_function_does_not_hold_up_the_others() -> None:
    barrier = threading.Barrier(40, timeout=PATIENCE_S)

    def mine(prompt: str, context: Context) -> str:
        barrier.wait()  # passes only when all forty run at once
        return "done"

    policy = function(mine)
    group = await asyncio.gather(*(policy.attempt(TASK, EMPTY_CONTEXT, i) for i in range(40)))
    assert {r.outcome for r in group} == {"ungraded"}


def test_a_function_of_the_wrong_shape_is_refused_at_once() -> None:
    for wrong in (lambda: "x", lambda prompt: "x", lambda a, b, c: "x"):
        with pytest.raises(ConfigError, match="called as"):
            function(wrong)
    with pytest.raises(ConfigError, match="policy_id"):
        FunctionPolicy(lambda a, b: "x", policy_id="")


async def test_time_is_measured_also_for_failures() -> None:
    def mine(prompt: str, context: Context) -> str:
        time.sleep(0.01)
        raise ValueError

    assert (await function(mine).attempt(TASK, EMPTY_CONTEXT, 0)).duration_s >= 0.01
