"""Every contract check runs over every implementation of ours, and catches its broken line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.policies.chat import ChatPolicy, FunctionPolicy, ToolPolicy
from tfgrpo.policies.tool_loop import ToolLoop
from tfgrpo.policies.tools import tool
from tfgrpo.protocols import Generated, ToolSpec
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task
from tfgrpo.routing.budgets.posterior_gain import PosteriorGain, Uniform
from tfgrpo.search.api import ALGORITHMS, make_algorithm
from tfgrpo.search.environments.cached import CachedEnvironment
from tfgrpo.search.environments.in_memory import DeepcopyEnvironment, ImmutableEnvironment
from tfgrpo.search.environments.tools import ToolEnvironment
from tfgrpo.search.node import call
from tfgrpo.search.state import explore
from tfgrpo.store.journal import Journal
from tfgrpo.testing import (
    check_algorithm,
    check_allocator,
    check_environment,
    check_generator,
    check_policy,
    check_recorder,
    check_verifier,
)
from tfgrpo.verifiers import (
    Code,
    Exact,
    FunctionVerifier,
    JsonSchema,
    Judge,
    Numeric,
    Regex,
    ToolCalls,
    Weighted,
)

TASK = Task("t", "What is 2+3?", reference="5")
TASKS = [Task(f"t{i}", "q", reference="1") for i in range(5)]
SPEC = ToolSpec("add", "", {"type": "object", "properties": {"a": {"type": "integer"}}})


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def group_of(task: Task = TASK, size: int = 3) -> RolloutGroup:
    rollouts = tuple(
        Rollout(f"r{i}", task.task_id, (Step(Message("assistant", "5")),), sample_index=i, seed=i)
        .graded(Score(float(i % 2), "said", {"a": 1.0}))
        for i in range(size)
    )  # fmt: skip
    return RolloutGroup("g-" + task.task_id, task, rollouts)


POLICIES: dict[str, Any] = {
    "chat": lambda: ChatPolicy(ScriptedLM("5")),
    "tools": lambda: ToolPolicy(ScriptedLM("5"), [tool(add)]),
    "tools as text": lambda: ToolPolicy(ScriptedLM("5"), [tool(add)], loop=ToolLoop("text")),
    "function": lambda: FunctionPolicy(lambda prompt, context: "5", policy_id="f"),
    "raising function": lambda: FunctionPolicy(lambda prompt, context: 1 / 0, policy_id="f"),
}


@pytest.mark.parametrize("name", POLICIES)
async def test_every_policy_keeps_the_contract(name: str) -> None:
    await check_policy(POLICIES[name](), TASK)


JUDGED = Rollout("r", "t", (Step(Message("assistant", "5")),))
VERIFIERS: dict[str, tuple[Any, Any]] = {
    "exact": (lambda: Exact(), "5"),
    "regex": (lambda: Regex(r"\d"), None),
    "numeric": (lambda: Numeric(), 5),
    "json": (lambda: JsonSchema({"type": "integer"}), 5),
    "tool calls": (lambda: ToolCalls([SPEC]), [{"name": "add", "arguments": {"a": 1}}]),
    "function": (lambda: FunctionVerifier(lambda r, t: 0.5, verifier_id="f"), None),
    "weighted": (lambda: Weighted({"a": (Exact(), 1.0), "b": (Regex("5"), 2.0)}), "5"),
    "judge": (lambda: Judge(ScriptedLM("Score: 85"), "Good?"), None),
    "code": (lambda: Code(level="process", i_understand=True), "assert True"),
}


@pytest.mark.real
@pytest.mark.parametrize("name", VERIFIERS)
async def test_every_verifier_keeps_the_contract(name: str) -> None:
    make, reference = VERIFIERS[name]
    await check_verifier(make(), JUDGED, Task("t", "What is 2+3?", reference=reference))


@pytest.mark.parametrize("make", [Uniform, PosteriorGain])
@pytest.mark.parametrize("history", [(), tuple(group_of(t) for t in TASKS[:3])])
def test_every_allocator_keeps_the_contract(make: Any, history: Any) -> None:
    check_allocator(make(), TASKS, history)


def test_an_allocator_that_overspends_is_caught() -> None:
    with pytest.raises(AssertionError, match="for a budget"):
        check_allocator(lambda tasks, history, budget: [budget] * len(tasks), TASKS)


def test_the_journal_keeps_the_recorders_contract(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "run", create=True, config={}) as journal:
        check_recorder(journal, group_of())


class Forgets:
    """A recorder that keeps nothing."""

    def find_rollout(self, rollout_id: str, verifier_id: str) -> None:
        return None

    def record_rollout(self, rollout: Rollout, *, group_id: str, verifier_id: str) -> None:
        pass

    def record_group(self, group: RolloutGroup) -> None:
        pass


def test_a_recorder_that_forgets_is_caught() -> None:
    with pytest.raises(AssertionError, match="not found as kept"):
        check_recorder(Forgets(), group_of())


class Counting:
    """A generator of one number a seed; broken ones depend on the size of the batch."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def generate(self, token_ids: Any, n: int, sampling: Any, seeds: Any) -> Any:
        size = len(token_ids) if self.broken else 0
        return [[Generated((s + size,), (-0.5,), "stop") for s in row] for row in seeds]

    def sync(self, named_params: Any) -> None:
        pass


def test_a_generator_whose_rows_depend_on_the_batch_is_caught() -> None:
    check_generator(Counting(), [[1], [2, 3]])
    with pytest.raises(AssertionError, match="depends on its batch"):
        check_generator(Counting(broken=True), [[1], [2, 3]])


def put(state: dict[str, Any], n: int) -> str:
    """Put."""
    state["n"] = n
    return "put"


ENVIRONMENTS: dict[str, Any] = {
    "tools with a state": lambda: ToolEnvironment([put], state={"n": 0}),
    "tools without a state": lambda: ToolEnvironment([add], effects={"add": "pure"}),
    "immutable": lambda: ImmutableEnvironment(0, lambda s, a: s + 1, key=str),
    "copied": lambda: DeepcopyEnvironment([0], lambda s, a: s.append(1), key=str),
    "cached": lambda: CachedEnvironment(ToolEnvironment([put], state={"n": 0})),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_every_environment_keeps_the_contract(name: str) -> None:
    await check_environment(ENVIRONMENTS[name](), [call("put", n=1), call("add", a=1, b=2)])


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_keeps_the_contract(name: str) -> None:
    def grow(algorithm: Any) -> Any:
        def next_of(state: int) -> Any:
            return [("one", state + 1, 1.0), ("two", state + 2, 1.5)]

        fold = explore(0, next_of, algorithm, is_goal=lambda s: s == 7, key=lambda s: None,
                       max_expansions=30)  # fmt: skip
        return fold.tree

    check_algorithm(lambda: make_algorithm(name), grow)
