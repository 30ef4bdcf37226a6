"""Sub-goals of the BFCL multi-turn base tasks as search problems.

The executable APIs are those of the package `bfcl-eval` (not a dependency): install it without its
dependencies somewhere and name the folder in `TFGRPO_BFCL`, or have it importable, with `mpmath`.

For a turn with two or more ground-truth calls: start = the APIs after the earlier turns; goal = the
same public state and all ground-truth answers of the turn among the answers so far; pool = the
task's own calls and distractors from tasks with the same APIs, 16 in all; memory = the function
names of other tasks' turns with the same APIs. The proposer is simulated: each sample is the next
right call with probability q while the path is still a prefix of the ground truth, else uniform
over the pool.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import random
import sys
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.environments import shared
from tfgrpo.runtime.canonical import derive_seed, digest
from tfgrpo.search import Node, PlanMemory, SearchContext, StepResult, action_key, call

MODULES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
PACKAGE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"


def is_available() -> str:
    """Return why the sub-goals cannot be run here, or an empty text."""
    if not shared("data", "search", "bfcl").exists():
        return "the shared data folder is absent (TFGRPO_SHARED)"
    folder = os.environ.get("TFGRPO_BFCL", "")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    try:
        importlib.import_module(f"{PACKAGE}.math_api")
    except ImportError as exc:
        return f"bfcl-eval is not importable ({exc}); see TFGRPO_BFCL"
    return ""


@dataclass(frozen=True, slots=True)
class Episode:
    """One task of the set."""

    task_id: str
    classes: tuple[str, ...]
    config: dict[str, Any]
    turns: list[list[tuple[str, Any]]]
    """For each turn, (API, action) of each ground-truth call."""


def read_episodes() -> list[Episode]:
    """Return the 200 tasks in file order."""
    folder = shared("data", "search", "bfcl")
    tasks = [json.loads(x) for x in (folder / "multi_turn_base.jsonl").read_text().splitlines()]
    text = (folder / "multi_turn_base_answers.jsonl").read_text()
    answers = [json.loads(x) for x in text.splitlines()]
    return [
        Episode(
            task["id"],
            tuple(sorted(task["involved_classes"])),
            task["initial_config"],
            [[(c["class"], call(c["name"], **c["arguments"])) for c in t] for t in answer["calls"]],
        )
        for task, answer in zip(tasks, answers, strict=True)
    ]


@dataclass(slots=True, eq=False)
class World:
    """The APIs of a task in one state, and the answers seen so far."""

    apis: dict[str, Any]
    answers: frozenset[str] = frozenset()
    key: str = ""


@dataclass(eq=False)
class SubGoal:
    """One turn as an environment; transitions are remembered by state and action."""

    goal_id: str
    task_id: str
    classes: tuple[str, ...]
    truth: list[tuple[str, Any]]
    pool: list[tuple[str, Any]]
    start_world: World
    goal_state: str = ""
    goal_answers: frozenset[str] = frozenset()
    is_simulator: bool = True
    transitions: dict[tuple[str, str], StepResult] = field(default_factory=dict)

    async def start(self) -> World:
        return self.start_world

    async def apply(self, handle: World, action: Any) -> StepResult:
        key = (handle.key, action_key(action))
        if key not in self.transitions:
            self.transitions[key] = self._run(handle, action)
        return self.transitions[key]

    def _run(self, handle: World, action: Any) -> StepResult:
        owner = next(api for api, known in self.pool if known["name"] == action["name"])
        apis = copy.deepcopy(handle.apis)
        try:
            answer = run_call(apis[owner], action)
        except Exception as exc:
            return StepResult(error=f"{type(exc).__name__}: {exc}")
        world = World(apis, handle.answers | {answer})
        world.key = world_key(world)
        is_goal = self.goal_answers <= world.answers and public_state(apis) == self.goal_state
        return StepResult(
            state=world,
            observation=answer[:500],
            state_key=world.key,
            is_terminal=is_goal,
            is_goal=is_goal,
        )

    def fork(self, handle: World) -> World:
        return handle

    def release(self, handle: World) -> None:
        pass

    def key(self, handle: World) -> str:
        return handle.key

    def effects(self, action: Any) -> str:
        return "reversible"


class SimulatedProposer:
    """Right with probability q while on track, else uniform over the pool."""

    def __init__(self, goal: SubGoal, q: float, seed: int) -> None:
        self.goal, self.q, self.seed = goal, q, seed
        self.actions = [action for _, action in goal.pool]
        self.truth = [action for _, action in goal.truth]
        self.truth_keys = [action_key(a) for a in self.truth]

    async def propose(self, ctx: SearchContext, node: Node, k: int) -> list[Any]:
        from tfgrpo.search import Proposal

        keys = [n.action_key for n in ctx.tree.path(node)[1:]]
        on_track = keys == self.truth_keys[: len(keys)] and len(keys) < len(self.truth)
        rng = random.Random(derive_seed(self.seed, self.goal.goal_id, keys, ctx.first_sample))
        drawn = []
        for _ in range(k):
            if on_track and rng.random() < self.q:
                drawn.append(self.truth[len(keys)])
            else:
                drawn.append(rng.choice(self.actions))
        return [Proposal(a) for a in drawn]


def read_subgoals(
    count: int = 60, every: int = 4, pool_size: int = 16, offset: int = 0
) -> list[SubGoal]:
    """Return the first sub-goals of every fourth task from `offset`, in file order."""
    episodes = read_episodes()
    found: list[SubGoal] = []
    for episode in episodes[offset::every]:
        apis = open_apis(episode)
        answers: set[str] = set()
        for number, turn in enumerate(episode.turns):
            if len(turn) >= 2:
                pool = _pool(episode, turn, episodes, pool_size, number)
                found.append(_subgoal(episode, number, turn, pool, apis, answers))
                if len(found) == count:
                    return found
            answers |= {run_call(apis[api], action) for api, action in turn}
    return found


def _subgoal(
    episode: Episode,
    number: int,
    turn: list[tuple[str, Any]],
    pool: list[tuple[str, Any]],
    apis: dict[str, Any],
    answers: set[str],
) -> SubGoal:
    end = copy.deepcopy(apis)
    wanted = frozenset(run_call(end[api], action) for api, action in turn)
    world = World(copy.deepcopy(apis), frozenset(answers))
    world.key = world_key(world)
    return SubGoal(
        f"{episode.task_id}/{number}",
        episode.task_id,
        episode.classes,
        turn,
        pool,
        world,
        public_state(end),
        wanted,
    )


def _pool(
    episode: Episode,
    turn: list[tuple[str, Any]],
    episodes: list[Episode],
    size: int,
    number: int,
) -> list[tuple[str, Any]]:
    own = {action_key(a): (api, a) for api, a in turn}
    for other_turn in episode.turns:
        for api, action in other_turn:
            if len(own) < size:
                own.setdefault(action_key(action), (api, action))
    others = {
        action_key(a): (api, a)
        for e in episodes
        if e.task_id != episode.task_id and e.classes == episode.classes
        for t in e.turns
        for api, a in t
    }
    rest = sorted(k for k in others if k not in own)
    rng = random.Random(derive_seed("pool", episode.task_id, number))
    rng.shuffle(rest)
    for key in rest[: max(0, size - len(own))]:
        own[key] = others[key]
    return list(own.values())


def memories(*, min_length: int) -> dict[tuple[str, ...], PlanMemory]:
    """Return, by API set, the turns of all tasks as plans; a search leaves its own task out."""
    found: dict[tuple[str, ...], PlanMemory] = {}
    for episode in read_episodes():
        memory = found.setdefault(episode.classes, PlanMemory(min_length=min_length))
        for turn in episode.turns:
            if turn:
                memory.add([a for _, a in turn], task_id=episode.task_id)
    return found


# --- the package's objects ----------------------------------------------------------------------


def open_apis(episode: Episode) -> dict[str, Any]:
    """Return fresh instances of a task's APIs in their first state."""
    apis = {}
    for name in episode.classes:
        api = getattr(importlib.import_module(f"{PACKAGE}.{MODULES[name]}"), name)()
        if hasattr(api, "_load_scenario"):
            api._load_scenario(copy.deepcopy(episode.config.get(name, {})), long_context=False)
        apis[name] = api
    return apis


def run_call(api: Any, action: Any) -> str:
    """Run one call and return its answer as text."""
    result = getattr(api, action["name"])(**copy.deepcopy(action["arguments"]))
    return result if isinstance(result, str) else json.dumps(result, sort_keys=True, default=str)


def public_state(apis: dict[str, Any]) -> str:
    """Return a text of everything that the source's state check looks at."""
    rows = {
        name: {k: _plain(v, ()) for k, v in vars(api).items() if not k.startswith("_")}
        for name, api in apis.items()
    }
    return digest(rows, 24)


def world_key(world: World) -> str:
    """Return a text of the whole state, private parts and answers included."""
    rows = {
        name: {k: _plain(v, ()) for k, v in vars(api).items() if k != "_api_description"}
        for name, api in world.apis.items()
    }
    return digest([rows, sorted(world.answers)], 24)


_NO_STATE = ("parent", "_last_modified")
"""The way back up, and the wall clock: the source's own comparison of files leaves both out."""


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, (str, int, bool)):
        return value
    if isinstance(value, float):
        return repr(value)
    if id(value) in above:
        return "<above>"
    above = (*above, id(value))
    if isinstance(value, dict):
        return {str(k): _plain(v, above) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, above) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(v) for v in value)
    if isinstance(value, random.Random):
        return digest(repr(value.getstate()), 16)
    if hasattr(value, "__dict__"):
        rows = {k: _plain(v, above) for k, v in vars(value).items() if k not in _NO_STATE}
        if hasattr(value, "parent"):
            rows["parent"] = getattr(value.parent, "name", None)
        return rows
    return str(value)
