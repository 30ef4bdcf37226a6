"""The model side: prompts that only grow, actions read from replies, judges, imagined plans."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from tfgrpo.errors import ProviderError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import ToolCall
from tfgrpo.protocols import Completion, Request, Sampling, ToolSpec
from tfgrpo.rollout import Task, Usage
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.search import (
    BestOfN,
    DepthFirst,
    LookaheadRollouts,
    Node,
    SearchContext,
    SearchSettings,
    TextEnvironment,
    ToolChainScorer,
    Tree,
    VisitRequest,
    call,
    search_tree,
)
from tfgrpo.search.environments.tools import ToolEnvironment
from tfgrpo.search.proposers.lm import JudgeScorer, LMExpander, LMImagination
from tfgrpo.search.state import VisitResult
from tfgrpo.search.worker import Ticket
from tfgrpo.store.budget import Budget, Ledger

SPEC = ToolSpec("go", "Go somewhere.", {"type": "object", "properties": {"place": {}}})


def context(tree: Tree | None = None, **options: Any) -> SearchContext:
    return SearchContext(Task("t", "go home"), tree or Tree(), **options)


async def propose(reply: Any, k: int = 1, **options: Any) -> Any:
    expander = LMExpander(ScriptedLM(reply), (SPEC,), **options)
    ctx = context()
    return await expander.propose(ctx, ctx.tree.root, k), expander, ctx


async def test_a_native_tool_call_is_an_action_and_plain_text_the_final_answer() -> None:
    asked = Completion("", tool_calls=(ToolCall("c", "go", '{"place": "home"}'),))
    found, _, _ = await propose([asked, "I am there."], 2)
    assert [p.action for p in found] == [
        call("go", place="home"),
        call("finish", answer="I am there."),
    ]


async def test_text_calls_are_read_and_broken_ones_counted() -> None:
    replies = ['Action: go {"place": "home"}', 'Action: go {"place": ', ""]
    found, expander, ctx = await propose(replies, 3, form="text")
    assert [p.action for p in found] == [call("go", place="home")]
    assert expander.invalid == 2
    assert ctx.spent["propose"].calls == 3
    assert '"name": "go"' in expander.request(ctx, ctx.tree.root).messages[0].content


async def test_a_child_s_prompt_is_its_parent_s_prompt_and_one_step_more() -> None:
    for form in ("native", "text"):
        expander = LMExpander(ScriptedLM("x"), (SPEC,), form=form, show_siblings=True)  # type: ignore[arg-type]  # both forms
        tree = Tree()
        child = tree.add(Node(-1, 0, 1, call("go", place="a"), "k", observation="you are at a"))
        grandchild = tree.add(Node(-1, 1, 2, call("go", place="b"), "k2", observation="at b"))
        ctx = context(tree)
        prompts = [expander.request(ctx, n).messages for n in (tree.root, child, grandchild)]
        # what was tried stands last and is not part of what a child inherits
        assert "go(place='a')" in prompts[0][-1].content
        shared = [list(p[:-1]) if i < 2 else list(p) for i, p in enumerate(prompts)]
        assert shared[1][: len(shared[0])] == shared[0]
        assert shared[2][: len(shared[1])] == shared[1]
        assert len(shared[2]) == len(shared[0]) + 4


async def test_a_short_answer_is_asked_again_and_a_late_failure_keeps_what_came() -> None:
    class Short(ScriptedLM):
        prefers_n = True

        async def complete(self, request: Request, n: int, seeds: Any) -> list[Completion]:
            scopes.append((current_scope().stage, current_scope().sample_index, n, len(seeds)))
            if len(scopes) == 3:
                raise ProviderError("late", kind="timeout")
            return await super().complete(request, min(n, 2), seeds)

    scopes: list[tuple[str, int, int, int]] = []
    expander = LMExpander(Short('Action: go {"place": "x"}'), (SPEC,), form="text")
    ctx = context(first_sample=8)
    found = await expander.propose(ctx, ctx.tree.root, 6)
    assert len(found) == 4
    assert scopes == [("search", 8, 6, 6), ("search", 10, 4, 4), ("search", 12, 2, 2)]
    assert [f.kind for f in ctx.failed] == ["timeout"]


async def test_each_draw_of_a_model_that_takes_one_at_a_time_fails_by_itself() -> None:
    class Single(ScriptedLM):
        async def complete(self, request: Request, n: int, seeds: Any) -> list[Completion]:
            places.append((current_scope().sample_index, n))
            if current_scope().sample_index in (8, 11):
                raise ProviderError("lost", kind="connection")
            return await super().complete(request, n, seeds)

    places: list[tuple[int, int]] = []
    expander = LMExpander(Single('Action: go {"place": "x"}'), (SPEC,), form="text")
    ctx = context(first_sample=8)
    found = await expander.propose(ctx, ctx.tree.root, 5)
    assert len(found) == 3 and places == [(8 + i, 1) for i in range(5)]
    assert ctx.spent["propose"].calls == 3
    assert [f.kind for f in ctx.failed] == ["connection", "connection"]
    places.clear()
    with pytest.raises(ProviderError, match="lost"):
        await expander.propose(ctx, ctx.tree.root, 1)


async def test_a_call_that_is_stopped_on_its_way_counts_as_one_that_may_be_billed() -> None:
    class Slow(ScriptedLM):
        async def complete(self, request: Request, n: int, seeds: Any) -> list[Completion]:
            if current_scope().sample_index == 0:
                return await super().complete(request, n, seeds)
            waiting.append(n)
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    waiting: list[int] = []
    expander = LMExpander(Slow('Action: go {"place": "x"}'), (SPEC,), form="text")
    ctx = context()
    task = asyncio.create_task(expander.propose(ctx, ctx.tree.root, 3))
    while len(waiting) < 2:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ctx.spent["propose"].calls == 1, "the reply that had come"
    assert [f.kind for f in ctx.failed] == ["connection", "connection"]


def test_one_lost_call_of_a_visit_costs_its_share_of_what_is_held() -> None:
    ledger = Ledger(Budget(calls=10, prompt_tokens=1000))
    ticket = Ticket(1, VisitRequest(0), 0, 3, VisitResult())
    ticket.reservation = ledger.reserve(calls=3, prompt_tokens=300)
    ticket.take_lost(ProviderError("reset", kind="connection"))
    ticket.take_lost(ProviderError("HTTP 503", kind="overloaded", status=503))
    ticket.take_lost(ProviderError("refused", kind="connection", was_sent=False))
    assert ticket.extra_calls == 2 and ticket.lost == {"prompt_tokens": 100.0}


async def test_a_search_with_a_model_over_tools_is_the_same_twice_and_counts_its_calls() -> None:
    def script(request: Request, seed: int | None) -> str:
        n = sum(m.role == "assistant" for m in request.messages)
        right = ["a", "b"][n] if n < 2 else "c"
        return f'Action: step {{"name": "{right if (seed or 0) % 3 else "z"}"}}'

    def step(state: dict[str, Any], name: str) -> str:
        """Make a step."""
        state["path"].append(name)
        return f"did {name}"

    async def once() -> Any:
        world = ToolEnvironment(
            [step], state={"path": []}, goal=lambda s: s["path"] == ["a", "b", "c"]
        )
        lm = ScriptedLM(script)
        expander = LMExpander(lm, world.specs, form="text", sampling=Sampling(max_tokens=20))
        result = await search_tree(
            Task("t", "spell abc"),
            expander,
            world,
            scorer=ToolChainScorer(),
            settings=SearchSettings(samples=4),
            budget=Budget(calls=200, completion_tokens=20_000),
        )
        assert result.usage_by_role["propose"].calls == len(lm.requests)
        return result

    first, second = await once(), await once()
    assert first.is_solved
    assert first.plan == second.plan == [call("step", name=n) for n in "abc"]
    assert first.usage == second.usage


async def test_dfsdt_shows_the_model_what_it_tried() -> None:
    seen: list[str] = []

    def script(request: Request, seed: int | None) -> str:
        seen.append(request.messages[-1].content)
        return f'Action: go {{"place": "p{len(seen)}"}}'

    class Deep(TextEnvironment):
        async def apply(self, handle: Any, action: Any) -> Any:
            from tfgrpo.search import StepResult

            return StepResult((), is_terminal=True, is_goal=False)

    lm = ScriptedLM(script)
    await search_tree(
        Task("t", "x"),
        LMExpander(lm, (SPEC,), form="text", show_siblings=True),
        Deep(),
        algorithm=DepthFirst.dfsdt(width=3),
        scorer=ToolChainScorer(),
        budget=Budget(expansions=3),
    )
    assert "go(place='p1')" not in seen[0] and "go(place='p1')" in seen[1]
    assert "go(place='p2')" in seen[2]


async def test_judges_average_and_an_unreadable_judgement_falls_back_on_the_share() -> None:
    tree = Tree()
    ctx = context(tree)
    nodes = [Node(-1, 0, 1, "a", "a", prior=0.25)]
    scorer = JudgeScorer(ScriptedLM(["Score: 4", "Score: 9"]), samples=2)
    found = await scorer.score(ctx, tree.root, nodes)
    assert found[0].value == pytest.approx(0.65)
    assert found[0].step_cost == pytest.approx(0.35)
    unread = await JudgeScorer(ScriptedLM("great!")).score(ctx, tree.root, nodes)
    assert unread[0].value == 0.25
    assert ctx.spent["score"].calls == 3


async def test_a_failing_judge_leaves_as_the_provider_s_error() -> None:
    nodes = [Node(-1, 0, 1, "a", "a"), Node(-1, 0, 1, "b", "b")]
    scorer = JudgeScorer(ScriptedLM(lambda r, s: ProviderError("no key", kind="auth")))
    ctx = context()
    with pytest.raises(ProviderError, match="no key"):
        await scorer.score(ctx, ctx.tree.root, nodes)


async def test_imagined_steps_are_counted_not_asked_for() -> None:
    tree = Tree()
    parent = tree.add(Node(-1, 0, 1, call("go", place="a"), "k"))
    nodes = [Node(-1, 1, 2, call("go", place=p), p) for p in "bc"]
    ctx = context(tree)
    per_parent = LMImagination(ScriptedLM("go\ntake\n\ngive"), (SPEC,))
    assert await per_parent.total_steps(ctx, parent, nodes) == [4.0, 4.0]
    done = LMImagination(ScriptedLM("none"), (SPEC,), per="child")
    assert await done.total_steps(ctx, parent, nodes) == [2.0, 2.0]
    assert ctx.spent["imagine"].calls == 3
    scorer = ToolChainScorer(preset="paper", imagination=per_parent)
    scores = await scorer.score(ctx, parent, nodes)
    assert scores[0].parts["h2"] == 0.25  # one ancestor of four


async def test_log_probabilities_become_tokens_entropy_and_branches() -> None:
    top = (
        {"a": math.log(0.9), "b": math.log(0.1)},
        {"x": math.log(0.5), "y": math.log(0.4)},
    )

    def script(request: Request, seed: int | None) -> Completion:
        prefix = request.messages[-1].content if request.messages[-1].role == "assistant" else ""
        prefixes.append(prefix)
        logs = (top[0]["a"], top[1]["x"])
        text = "" if prefix else "ax"
        return Completion(
            text or " more and other words",
            top_logprobs=top,
            logprobs=logs,
            usage=Usage(calls=1, text_tokens=2),
        )

    prefixes: list[str] = []
    result = await search_tree(
        Task("t", "x"),
        LMExpander(ScriptedLM(script), sampling=Sampling(logprobs=True, top_logprobs=2)),
        TextEnvironment(lambda action: True),
        algorithm=LookaheadRollouts(2, min_edit=0.0),
        scorer=ToolChainScorer(),
        budget=Budget(expansions=5),
    )
    assert prefixes == ["", "ay"]
    first = result.fold.tree[1].proposal
    assert first is not None and first.tokens == ("a", "x")
    assert first.entropy == pytest.approx(
        (-(0.9 * math.log(0.9) + 0.1 * math.log(0.1)) / math.log(2) + entropy(5 / 9)) / 2
    )
    assert result.fold.tree[2].action.startswith("ay more")


def entropy(p: float) -> float:
    return -(p * math.log(p) + (1 - p) * math.log(1 - p)) / math.log(2)


async def test_a_vote_over_model_answers_converges() -> None:
    result = await search_tree(
        Task("t", "2+2?"),
        LMExpander(ScriptedLM("Answer: 4")),
        TextEnvironment(),
        algorithm=BestOfN.self_consistency(20, confidence=0.9),
        scorer=ToolChainScorer(),
        budget=Budget(expansions=50),
    )
    assert result.stop_reason == "converged"
    assert result.plan == ["Answer: 4"]
    assert VisitRequest(0).k == 0
