"""The tool loop: native and text calls, failures as observations, limits."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tfgrpo.context import EMPTY_CONTEXT, Context, ContextPart
from tfgrpo.errors import BudgetError, ConfigError, ProviderError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message, ToolCall
from tfgrpo.policies.chat import ToolPolicy
from tfgrpo.policies.tool_loop import ToolLoop
from tfgrpo.policies.tools import Tool, tool
from tfgrpo.protocols import Completion, Request, Sampling
from tfgrpo.rollout import Rollout, Task, Usage
from tfgrpo.runtime.terminal import clip

TASK = Task("t1", "What is 2+3?", reference="SECRET")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def calls(*pairs: tuple[str, str]) -> Completion:
    made = tuple(ToolCall(f"c{i}", name, args) for i, (name, args) in enumerate(pairs))
    return Completion("", finish="tool_calls", tool_calls=made, usage=Usage(text_tokens=1, calls=1))


async def run(replies: Any, tools: Any = None, **kwargs: Any) -> tuple[Rollout, ScriptedLM]:
    lm = ScriptedLM(replies)
    policy = ToolPolicy(lm, [tool(add)] if tools is None else tools, **kwargs)
    return await policy.attempt(TASK, EMPTY_CONTEXT, 7), lm


async def test_a_native_call_is_run_and_its_result_shown() -> None:
    done, lm = await run([calls(("add", '{"a": 2, "b": 3}')), "It is 5."])
    assert (done.outcome, done.answer) == ("ungraded", "It is 5.")
    assert done.steps[0].observations == (Message("tool", "5", tool_call_id="c0"),)
    assert [s.name for s in lm.requests[0].tools] == ["add"]
    assert lm.requests[1].messages[-2:] == (done.steps[0].action, *done.steps[0].observations)
    assert done.metadata == {"mode": "native", "tool_calls": 1, "stopped": "answer"}
    assert done.usage.calls == 2
    assert "SECRET" not in repr(lm.requests)


async def test_several_calls_of_one_reply_run_in_order() -> None:
    log: list[str] = []

    async def note(word: str) -> str:
        await asyncio.sleep(0.01 if word == "first" else 0)
        log.append(word)
        return word

    done, _ = await run(
        [calls(("note", '{"word": "first"}'), ("note", '{"word": "second"}')), "ok"], [tool(note)]
    )
    assert log == ["first", "second"]
    assert [m.tool_call_id for m in done.steps[0].observations] == ["c0", "c1"]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("subtract", "{}", "there is no tool 'subtract'; the tools are add"),
        ("add", '{"a": 2', "not a JSON object"),
        ("add", "[1, 2]", "not a JSON object"),
        ("add", '{"a": "2", "b": 3}', "'2' is not of type 'integer'"),
        ("add", '{"a": 2}', "'b' is a required property"),
        ("add", '{"a": 2, "b": 3, "c": 4}', "unknown argument 'c'"),
    ],
)
async def test_a_wrong_call_is_told_to_the_model(name: str, arguments: str, said: str) -> None:
    done, _ = await run([calls((name, arguments)), "sorry"])
    assert done.outcome == "ungraded"
    assert said in done.steps[0].observations[0].content


async def test_a_raising_or_slow_tool_is_an_observation() -> None:
    release = threading.Event()

    def broken(x: int) -> int:
        raise ValueError("no\nsuch thing")

    def leaves(x: int) -> int:
        raise SystemExit(1)

    async def slow(x: int) -> int:
        await asyncio.sleep(30)
        return x

    def blocks(x: int) -> int:
        release.wait(5)
        return x

    class Odd:
        def __str__(self) -> str:
            raise ValueError("no text")

    def odd(x: int) -> object:
        return Odd()

    tools = [tool(f) for f in (broken, leaves, odd)]
    tools += [tool(slow, timeout_s=0.02), tool(blocks, timeout_s=0.02)]
    names = [t.spec.name for t in tools]
    done, _ = await run([calls(*((n, '{"x": 1}') for n in names)), "ok"], tools)
    release.set()
    said = [m.content for m in done.steps[0].observations]
    assert "ValueError: no such thing" in said[0]
    assert "SystemExit" in said[1]
    assert "no text" in said[2]
    assert "0.02 s" in said[3] and "0.02 s" in said[4]
    assert done.outcome == "ungraded" and done.metadata["tool_calls"] == 5


async def test_what_belongs_to_the_run_passes_through_a_tool() -> None:
    def pays(x: int) -> int:
        raise BudgetError("cap", resource="calls")

    with pytest.raises(BudgetError):
        await run([calls(("pays", '{"x": 1}'))], [tool(pays)])


async def test_the_step_limit_ends_the_loop_with_everything_observed() -> None:
    done, lm = await run(
        lambda r, s: calls(("add", '{"a": 1, "b": 1}')), loop=ToolLoop(max_steps=3)
    )
    assert len(lm.requests) == 3 and len(done.steps) == 3
    assert done.outcome == "ungraded" and done.metadata["stopped"] == "max_steps"
    assert all(s.observations for s in done.steps)


async def test_a_cut_reply_ends_the_loop_and_runs_nothing() -> None:
    cut = Completion("", finish="length", tool_calls=(ToolCall("c", "add", '{"a": 1, "b": 1}'),))
    done, _ = await run([cut])
    assert done.is_truncated and done.outcome == "ungraded"
    assert done.steps[0].observations == () and done.metadata["tool_calls"] == 0


async def test_a_failure_in_the_middle_keeps_what_was_done() -> None:
    done, _ = await run([calls(("add", '{"a": 1, "b": 1}')), ProviderError("gone", kind="quota")])
    assert done.outcome == "provider_failed" and done.metadata["provider_kind"] == "quota"
    assert len(done.steps) == 1 and done.usage.calls == 2


async def test_a_long_result_keeps_head_and_tail() -> None:
    def dump(x: int) -> str:
        return "HEAD" + "x" * 1_000_000 + "TAIL"

    done, _ = await run(
        [calls(("dump", '{"x": 1}')), "ok"],
        [tool(dump)],
        loop=ToolLoop(max_observation_chars=500),
    )
    text = done.steps[0].observations[0].content
    assert len(text) <= 500 and text.startswith("HEAD") and text.endswith("TAIL")
    assert "characters left out" in text


def test_clipping_counts_what_it_left_out() -> None:
    for most in range(45, 120):
        text = clip("a" * 200, most)
        assert len(text) <= most
        kept = len(text.split("\n")[0]) + len(text.split("\n")[-1])
        assert kept == 200 - int(text.split("[")[1].split()[0])


async def test_surplus_calls_of_one_reply_are_refused_aloud() -> None:
    done, _ = await run(
        [calls(*[("add", '{"a": 1, "b": 1}')] * 5), "ok"],
        loop=ToolLoop(max_calls_a_step=2),
    )
    said = [m.content for m in done.steps[0].observations]
    assert said[:2] == ["2", "2"] and all("not run" in s for s in said[2:])


async def test_text_mode_offers_tools_in_the_prompt_and_reads_actions() -> None:
    done, lm = await run(
        ['I add.\nAction: add {"a": 2, "b": 3}', "Answer: 5"],
        loop=ToolLoop("text"),
        system="Be brief.",
    )
    first, second = lm.requests
    assert first.tools == () and "add: Add two numbers." in first.messages[0].content
    assert first.messages[0].content.startswith("Be brief.")
    assert "\nObservation:" in first.sampling.stop
    assert second.messages[-1] == Message("user", "Observation: 5")
    assert done.answer == "Answer: 5" and done.metadata["mode"] == "text"


async def test_text_mode_turns_native_examples_into_text() -> None:
    lm = ScriptedLM(["5"])
    turns = (
        Message("user", "1+1?"),
        Message("assistant", "", (ToolCall("c", "add", '{"a": 1}'),)),
        Message("tool", "2", tool_call_id="c"),
    )
    context = Context((ContextPart("exemplar", turns=turns),))
    await ToolPolicy(lm, [tool(add)], loop=ToolLoop("text")).attempt(TASK, context, 0)
    sent = lm.requests[0].messages
    assert Message("assistant", 'Action: add {"a": 1}') in sent
    assert Message("user", "Observation: 2") in sent
    assert {m.role for m in sent} == {"system", "user", "assistant"}


async def test_auto_mode_falls_back_to_text_once_and_remembers() -> None:
    def script(request: Request, seed: int | None) -> str:
        if request.tools:
            raise ProviderError("tools are not supported", kind="bad_request")
        return "5"

    lm = ScriptedLM(script)
    policy = ToolPolicy(lm, [tool(add)])
    first = await policy.attempt(TASK, EMPTY_CONTEXT, 0)
    second = await policy.attempt(TASK, EMPTY_CONTEXT, 1)
    assert [first.answer, second.answer] == ["5", "5"]
    assert first.metadata["mode"] == second.metadata["mode"] == "text"
    assert [bool(r.tools) for r in lm.requests] == [True, False, False]
    strict = await ToolPolicy(lm, [tool(add)], loop=ToolLoop("native")).attempt(
        TASK, EMPTY_CONTEXT, 0
    )
    assert strict.outcome == "provider_failed"


async def test_a_server_that_ignores_tools_may_still_act_in_text() -> None:
    done, _ = await run(['Action: add {"a": 2, "b": 3}', "5"])
    assert done.steps[0].observations[0] == Message("user", "Observation: 5")
    prose, _ = await run(["Action: think about it"])
    assert prose.answer == "Action: think about it" and prose.metadata["tool_calls"] == 0


async def test_a_factory_gives_each_attempt_its_own_tools() -> None:
    def fresh() -> list[Tool]:
        count = [0]

        def tick() -> int:
            """Count."""
            count[0] += 1
            return count[0]

        return [tool(tick)]

    def script(request: Request, seed: int | None) -> Completion:
        asked = sum(m.role == "tool" for m in request.messages)
        return calls(("tick", "")) if asked < 2 else Completion("done")

    policy = ToolPolicy(ScriptedLM(script), fresh)
    group = await asyncio.gather(*(policy.attempt(TASK, EMPTY_CONTEXT, i) for i in range(3)))
    seen = [[m.content for s in r.steps for m in s.observations] for r in group]
    assert seen == [["1", "2"]] * 3


async def test_a_factory_that_raises_is_a_failed_policy() -> None:
    made: list[int] = []

    def fresh() -> list[Tool]:
        made.append(1)
        if len(made) > 1:
            raise RuntimeError("no shop")
        return [tool(add)]

    done = await ToolPolicy(ScriptedLM("x"), fresh).attempt(TASK, EMPTY_CONTEXT, 0)
    assert done.outcome == "policy_failed" and "no shop" in done.error


async def test_every_step_draws_under_a_seed_of_its_own() -> None:
    seeds: list[int | None] = []

    def script(request: Request, seed: int | None) -> Completion:
        seeds.append(seed)
        return calls(("add", '{"a": 1, "b": 1}')) if len(seeds) % 3 else Completion("done")

    policy = ToolPolicy(ScriptedLM(script), [tool(add)])
    await policy.attempt(TASK, EMPTY_CONTEXT, 7)
    await policy.attempt(TASK, EMPTY_CONTEXT, 7)
    assert seeds[:3] == seeds[3:] and len(set(seeds)) == 3 and seeds[0] == 7


def test_the_id_changes_with_everything_that_the_model_sees() -> None:
    def twin(a: int, b: int) -> int:
        """Add two whole numbers."""
        return a + b

    base = {"tools": [tool(add)]}
    variants: list[dict[str, Any]] = [
        base,
        {"tools": [tool(twin, name="add")]},
        {"tools": [tool(add), tool(twin)]},
        {**base, "system": "x"},
        {**base, "loop": ToolLoop("text")},
        {**base, "loop": ToolLoop(max_steps=3)},
        {**base, "sampling": Sampling(temperature=0.1)},
        {**base, "loop": ToolLoop(max_observation_chars=9)},
    ]
    ids = [ToolPolicy(ScriptedLM("x"), **v).policy_id for v in variants]
    assert len(set(ids)) == len(ids)
    assert ToolPolicy(ScriptedLM("y"), **base).policy_id == ids[0]


def test_a_wrong_setting_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="ToolPolicy: two tools"):
        ToolPolicy(ScriptedLM("x"), [tool(add), tool(add)])
    for wrong in ({"mode": "xml"}, {"max_steps": 0}):
        with pytest.raises(ConfigError, match=f"ToolPolicy: {next(iter(wrong))}"):
            ToolLoop(**wrong)  # type: ignore[arg-type]
