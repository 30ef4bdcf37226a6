"""Environments: branches never see each other, failures are contained, caches know the state."""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.environments import airline, shared
from tests.benchmarks.search import search_environments
from tfgrpo.errors import ConfigError
from tfgrpo.search import (
    DeepcopyEnvironment,
    ImmutableEnvironment,
    ReplayEnvironment,
    StepResult,
    action_key,
    call,
)
from tfgrpo.search.environments.cached import CachedEnvironment
from tfgrpo.search.environments.tools import (
    ToolEnvironment,
    ToolRules,
    specs_from_openai,
    stateful_tool,
)
from tfgrpo.search.environments.undo_log import UndoLog, UndoLogEnvironment

NO_DATA = not shared("data", "search", "taubench_airline").exists()


def count(state: dict[str, Any], action: Any) -> str:
    """A tool over a dict: `add n`, `fail` after a change, `look`."""
    name, arguments = action["name"], action["arguments"]
    if name == "add":
        state["box"]["n"] += arguments["n"]
        state["box"]["seen"].append(arguments["n"])
    if name == "fail":
        state["box"]["n"] = -1
        raise RuntimeError("broken in the middle")
    return str(state["box"]["n"])


START: dict[str, Any] = {"box": {"n": 0, "seen": []}}


def make(kind: str) -> Any:
    if kind == "journal":
        return UndoLogEnvironment(START, count)
    return DeepcopyEnvironment(START, count)


@pytest.mark.parametrize("kind", ["journal", "deepcopy"])
async def test_siblings_never_see_each_other_and_a_failed_call_changes_nothing(kind: str) -> None:
    world = make(kind)
    start = await world.start()
    one = await world.apply(start, call("add", n=1))
    ten = await world.apply(start, call("add", n=10))
    failed = await world.apply(one.state, call("fail"))
    assert "broken in the middle" in failed.error
    assert [(await world.apply(h, call("look"))).observation for h in (start, one.state)] == [
        "0",
        "1",
    ]
    assert (await world.apply(ten.state, call("add", n=5))).observation == "15"
    again = await world.apply(start, call("add", n=1))
    assert again.state_key == one.state_key != ten.state_key
    assert START == {"box": {"n": 0, "seen": []}}


KEYS = st.sampled_from(["a", "b", "c"])
OPERATION = st.one_of(
    st.tuples(st.just("set"), KEYS, st.integers(0, 3)),
    st.tuples(st.just("del"), KEYS, st.just(0)),
    st.tuples(st.just("append"), KEYS, st.integers(0, 3)),
    st.tuples(st.just("pop"), KEYS, st.just(0)),
    st.tuples(st.just("insert"), KEYS, st.integers(0, 3)),
    st.tuples(st.just("sort"), KEYS, st.just(0)),
    st.tuples(st.just("nest"), KEYS, st.integers(0, 3)),
    st.tuples(st.just("clear"), KEYS, st.just(0)),
    st.tuples(st.just("update"), KEYS, st.integers(0, 3)),
    st.tuples(st.just("slice"), KEYS, st.integers(0, 3)),
)


def operate(data: dict[str, Any], operation: tuple[str, str, int]) -> None:
    """Apply one operation to plain or journalled data alike."""
    kind, key, value = operation
    table, rows = data["table"], data["rows"]["list"]
    if kind == "set":
        table[key] = value
    elif kind == "del" and key in table:
        del table[key]
    elif kind == "append":
        rows.append(value)
    elif kind == "pop" and rows:
        rows.pop(0)
    elif kind == "insert":
        rows.insert(1, value)
    elif kind == "sort":
        rows.sort(reverse=True)
    elif kind == "nest":
        table.setdefault(key, {"deep": []})
        if isinstance(table[key], dict):
            table[key]["deep"].append(value)
    elif kind == "clear":
        table.clear()
    elif kind == "update":
        table.update({key: value, "z": [value]})
    elif kind == "slice":
        rows[:1] = [value, value]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 1000), OPERATION), max_size=40))
def test_a_journal_is_everywhere_what_a_deep_copy_would_be(
    steps: list[tuple[int, tuple[str, str, int]]],
) -> None:
    start: dict[str, Any] = {"table": {"a": 1}, "rows": {"list": [3, 1]}}
    journal = UndoLog(start)
    versions, plain = [journal.here], [copy.deepcopy(start)]
    for pick, operation in steps:
        at = pick % len(versions)
        journal.go(versions[at])
        operate(journal.data, operation)
        versions.append(journal.mark())
        plain.append(copy.deepcopy(plain[at]))
        operate(plain[-1], operation)
    for version, expected in zip(versions, plain, strict=True):
        journal.go(version)
        assert journal.data == expected
        assert list(journal.data["table"]) == list(expected["table"])  # the order of keys, too
    for i, first in enumerate(plain):
        for j, second in enumerate(plain[:i]):
            assert (versions[i].key == versions[j].key) == (first == second)


def test_a_journal_refuses_what_it_cannot_follow() -> None:
    with pytest.raises(TypeError, match="DeepcopyEnvironment"):
        UndoLog({"table": {"x": object()}})


@pytest.mark.skipif(NO_DATA, reason="shared data are absent")
async def test_rebuilt_airline_tools_answer_every_recorded_call_alike() -> None:
    equal, total = await search_environments.replay_recordings(airline.environment())
    assert (equal, total) == (1164, 1164)


async def test_a_step_that_changes_the_state_it_was_given_is_caught_and_undone() -> None:
    def step(state: list[int], action: str) -> list[int]:
        state.append(1)
        return state

    world = ImmutableEnvironment([0], step, guard=True)
    start = await world.start()
    outcome = await world.apply(start, "x")
    assert "changed the state" in outcome.error and outcome.notes == ("mutated shared state",)
    assert start == [0]


# --- replay -------------------------------------------------------------------------------------


class Counter:
    """A session that can only go forward."""

    opened = 0

    def __init__(self) -> None:
        Counter.opened += 1
        self.value = 0

    async def act(self, action: Any) -> StepResult:
        if action["name"] == "look":
            return StepResult(observation=str(self.value))
        if action["arguments"]["n"] > 50:
            return StepResult(error="too much")
        self.value += action["arguments"]["n"]
        return StepResult(observation=str(self.value))

    async def close(self) -> None:
        self.value = -1


async def open_counter() -> Counter:
    return Counter()


async def test_replay_makes_a_state_anew_only_where_it_has_to() -> None:
    Counter.opened = 0
    effect: Any = lambda a: "read" if a["name"] == "look" else "reversible"  # noqa: E731
    world = ReplayEnvironment(open_counter, effect=effect)
    start = await world.start()
    one = await world.apply(start, call("add", n=1))
    two = await world.apply(one.state, call("add", n=2))  # goes on in the open session
    look = await world.apply(two.state, call("look"))
    assert (two.observation, look.observation, Counter.opened, world.replayed) == ("3", "3", 1, 0)
    other = await world.apply(one.state, call("add", n=5))
    assert (other.observation, Counter.opened, world.replayed) == ("6", 2, 1)
    failed = await world.apply(other.state, call("add", n=99))
    assert failed.error == "too much"
    assert (await world.apply(other.state, call("look"))).observation == "6"
    await world.close()


# --- caches -------------------------------------------------------------------------------------


class Shop:
    """Stock that can be read, bought from, and multiplied with (pure)."""

    is_simulator = True

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.fails = 1

    async def start(self) -> int:
        return 3

    async def apply(self, handle: int, action: Any) -> StepResult:
        name = action["name"]
        self.runs.append(name)
        await asyncio.sleep(0)
        if name == "stock":
            return StepResult(handle, f"{handle} left", str(handle))
        if name == "double":
            return StepResult(handle, str(2 * action["arguments"]["x"]), str(handle))
        if name == "flaky":
            self.fails -= 1
            if self.fails >= 0:
                return StepResult(error="try again")
        return StepResult(handle - 1, "bought", str(handle - 1))

    def fork(self, handle: int) -> int:
        return handle

    def release(self, handle: int) -> None:
        pass

    def key(self, handle: int) -> str:
        return str(handle)

    def effects(self, action: Any) -> Any:
        return {"stock": "read", "double": "pure"}.get(action["name"], "reversible")


async def test_a_cache_never_answers_from_another_state() -> None:
    """Fails under keys of (tool, arguments): the second reading would still say 3."""
    shop = Shop()
    world = CachedEnvironment(shop)
    start = await world.start()
    first = await world.apply(start, call("stock"))
    bought = await world.apply(start, call("buy"))
    second = await world.apply(bought.state, call("stock"))
    assert (first.observation, second.observation) == ("3 left", "2 left")
    assert (await world.apply(start, call("stock"))).observation == "3 left"
    assert shop.runs == ["stock", "buy", "stock"]


async def test_a_pure_call_is_run_once_and_leaves_everybody_in_their_own_state() -> None:
    shop = Shop()
    world = CachedEnvironment(shop)
    start = await world.start()
    bought = await world.apply(start, call("buy"))
    first = await world.apply(start, call("double", x=4))
    second = await world.apply(bought.state, call("double", x=4.0))
    assert (first.observation, second.observation) == ("8", "8")
    assert (first.state, second.state) == (3, 2)
    assert (first.tool_calls, second.tool_calls) == (1, 0)
    assert shop.runs == ["buy", "double"]


async def test_fifty_askers_at_once_are_one_run_and_a_failure_is_tried_again() -> None:
    shop = Shop()
    world = CachedEnvironment(shop)
    outcomes = await asyncio.gather(*(world.apply(3, call("stock")) for _ in range(50)))
    assert shop.runs == ["stock"]
    assert {o.observation for o in outcomes} == {"3 left"}
    assert sum(o.tool_calls for o in outcomes) == 1
    assert (await world.apply(3, call("flaky"))).error
    assert (await world.apply(3, call("flaky"))).observation == "bought"


async def test_a_cancelled_run_does_not_take_those_who_wait_with_it() -> None:
    shop = Shop()
    world = CachedEnvironment(shop)
    first = asyncio.create_task(world.apply(3, call("stock")))
    await asyncio.sleep(0)
    second = asyncio.create_task(world.apply(3, call("stock")))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).observation == "3 left"


# --- a user's tools -----------------------------------------------------------------------------

OUTSIDE: list[int] = []


def add(state: dict[str, Any], n: int) -> str:
    """Add n.

    Args:
        n: how much
    """
    state["n"] += n
    return f"now {state['n']}"


def peek(state: dict[str, Any]) -> str:
    """Look, but change something all the same."""
    state["n"] += 100
    return "peeked"


def hang(state: dict[str, Any]) -> str:
    """Never come back."""
    time.sleep(1.0)
    state["n"] = -1
    return "late"


def crash(state: dict[str, Any]) -> str:
    """Raise after a change."""
    state["n"] = -1
    raise ValueError("out of paper")


def big(state: dict[str, Any]) -> str:
    """Answer with five megabytes."""
    return "x" * 5_000_000


def remember(state: dict[str, Any]) -> str:
    """Keep state in a global."""
    OUTSIDE.append(1)
    return f"{len(OUTSIDE)} times"


def tools(**options: Any) -> ToolEnvironment:
    return ToolEnvironment(
        [
            *(stateful_tool(fn) for fn in (add, peek, crash, big, remember)),
            stateful_tool(hang, timeout_s=0.05),
        ],
        state={"n": 0},
        effects={"peek": "read"},
        rules=ToolRules(max_observation_bytes=1_000, **options),
    )


async def test_a_tool_that_raises_or_hangs_is_contained_and_the_state_stays() -> None:
    world = tools(max_hangs=2)
    start = await world.start()
    crashed = await world.apply(start, call("crash"))
    assert "out of paper" in crashed.error
    hung = [await world.apply(start, call("hang")) for _ in range(3)]
    assert [h.notes for h in hung] == [("hung",), ("hung",), ("refused",)]
    await asyncio.sleep(1.1)  # the hung threads come back and change their own copies
    assert (await world.apply(start, call("add", n=2))).observation == "now 2"
    report = world.reports["hang"]
    assert (report.hangs, report.refused, world.reports["crash"].errors) == (2, 1, 1)


async def test_five_megabytes_are_cut_and_told() -> None:
    world = tools()
    outcome = await world.apply(await world.start(), call("big"))
    assert len(outcome.observation) < 1_100
    assert outcome.observation.endswith("[cut: 5,000,000 bytes in all, 1,000 shown]")
    assert world.reports["big"].cut_answers == 1


async def test_a_reading_tool_that_changes_the_state_is_reported_and_its_change_dropped() -> None:
    world = tools()
    start = await world.start()
    peeked = await world.apply(start, call("peek"))
    assert peeked.notes == ("changed the state though declared to read",)
    assert (await world.apply(peeked.state, call("add", n=1))).observation == "now 1"
    assert world.reports["peek"].mutations == 1


async def test_an_audit_finds_tools_that_keep_state_elsewhere() -> None:
    world = tools()
    found = await world.audit([call("add", n=1), call("remember")])
    assert list(found) == ["remember"]
    assert "keeps state elsewhere" in found["remember"]


async def test_wrong_calls_never_run_and_say_what_is_wrong() -> None:
    world = tools()
    start = await world.start()
    for action, text in (
        (call("ad", n=1), "unknown tool 'ad'"),
        (call("add", n="1"), "not of type 'integer'"),
        (call("add"), "'n' is a required property"),
        ({"name": "add", "arguments": "x"}, "no JSON object"),
    ):
        outcome = await world.apply(start, action)
        assert text in outcome.error
        assert outcome.tool_calls == 0
    assert world.reports["add"].calls == 0


def test_schemas_hide_the_state_and_read_openai_s_form() -> None:
    spec = tools().specs[0]
    assert spec.parameters["properties"] == {"n": {"type": "integer", "description": "how much"}}
    rows = [{"type": "function", "function": spec.to_dict()}, {"name": "bare"}]
    assert specs_from_openai(rows)[0] == spec
    with pytest.raises(ConfigError, match="needs a name"):
        specs_from_openai([{"function": {}}])
    with pytest.raises(ConfigError, match="unknown tools"):
        ToolEnvironment([add], state={}, effects={"sub": "pure"})


def test_action_keys_are_equal_exactly_for_equal_calls() -> None:
    same = [call("f", a=1, b="x"), call("f", b=" x", a=1.0), {"arguments": {"b": "x", "a": 1}}]
    same[2]["name"] = "f"
    assert len({action_key(a) for a in same}) == 1
    others = [call("f", a=1), call("f", a="1"), call("f", a=True), call("g", a=1), call("f", a=[1])]
    assert len({action_key(a) for a in others}) == 5
