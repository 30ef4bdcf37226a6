"""A small home-made tool world: A* beside a single attempt.

Somebody waits for a thing that lies elsewhere: walk, take it, walk, hand it over. The tools change
a state; the goal is tested by the world. Without a model a scripted walker proposes actions, right
in every second draw; it takes seconds:

    python -m examples.tool_world_search                        (or: tfgrpo search CONFIG.toml)
    python -m examples.tool_world_search local:smollm2-135m     the embedded model, minutes
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from typing import Any

from tfgrpo.context import Context, ContextPart
from tfgrpo.lm import open_lm
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.protocols import LM, Request, Sampling
from tfgrpo.rollout import Task
from tfgrpo.search import BestOfN, CheckedExpander, PlanMemory, SearchSettings, search_tree
from tfgrpo.search.environments.tools import ToolEnvironment
from tfgrpo.search.proposers.lm import LMExpander
from tfgrpo.search.views import to_ascii
from tfgrpo.store.budget import Budget

PLACES = ("kitchen", "garden", "hall", "attic")


def go(state: dict[str, Any], place: str) -> str:
    """Walk to a place."""
    if place not in PLACES:
        raise ValueError(f"there is no {place}; places: {', '.join(PLACES)}")
    state["at"] = place
    seen = [f"the {thing}" for thing, where in state["things"].items() if where == place]
    seen += [who for who, where in state["people"].items() if where == place]
    return f"You are in the {place}. You see {' and '.join(seen) or 'nothing'}."


def take(state: dict[str, Any], thing: str) -> str:
    """Pick up a thing that lies here."""
    if state["things"].get(thing) != state["at"]:
        raise ValueError(f"there is no {thing} in the {state['at']}")
    state["things"][thing] = "you"
    return f"You carry the {thing}."


def give(state: dict[str, Any], thing: str, person: str) -> str:
    """Hand a thing that you carry to somebody who is here."""
    if state["things"].get(thing) != "you":
        raise ValueError(f"you do not carry the {thing}")
    if state["people"].get(person) != state["at"]:
        raise ValueError(f"{person} is not in the {state['at']}")
    state["things"][thing] = person
    return f"{person} has the {thing} now."


def make_world(task: Task) -> ToolEnvironment:
    """Return the world of a task; its metadata say what lies and who waits where."""
    facts = task.metadata
    state = {
        "at": "hall",
        "things": {facts["thing"]: facts["thing_at"], "lamp": "attic"},
        "people": {facts["person"]: facts["person_at"]},
    }
    return ToolEnvironment(
        [go, take, give],
        state=state,
        goal=lambda s: s["things"][facts["thing"]] == facts["person"],
        finish=False,
    )


def make_task(number: int, person: str, person_at: str, thing: str, thing_at: str) -> Task:
    """Return one errand."""
    return Task(
        f"errand-{number}",
        f"Go to the {thing_at} and take the {thing}. "
        f"Then go to the {person_at} and give the {thing} to {person}.",
        metadata={
            "person": person,
            "person_at": person_at,
            "thing": thing,
            "thing_at": thing_at,
        },
    )


TASKS = (
    make_task(1, "Ann", "garden", "key", "kitchen"),
    make_task(2, "Bob", "kitchen", "book", "attic"),
    make_task(3, "Eve", "attic", "rope", "garden"),
)


def example(person: str, person_at: str, thing: str, thing_at: str) -> ContextPart:
    """Return a worked errand as chat turns: small models learn the form by example only."""
    steps = (
        (f'go {{"place": "{thing_at}"}}', f"You are in the {thing_at}. You see the {thing}."),
        (f'take {{"thing": "{thing}"}}', f"You carry the {thing}."),
        (f'go {{"place": "{person_at}"}}', f"You are in the {person_at}. You see {person}."),
        (
            f'give {{"thing": "{thing}", "person": "{person}"}}',
            f"{person} has the {thing} now.",
        ),
    )
    turns = [Message("user", make_task(0, person, person_at, thing, thing_at).text)]
    for action, seen in steps:
        turns.append(Message("assistant", f"Action: {action}"))
        turns.append(Message("user", f"Observation: {seen}"))
    return ContextPart("exemplar", turns=tuple(turns[:-1]))


CONTEXT = Context(
    (
        example("Tom", "attic", "cup", "hall"),
        example("Mia", "hall", "coat", "garden"),
        example("Joe", "garden", "pan", "kitchen"),
    )
)


_ERRAND = re.compile(
    r"Go to the (\w+) and take the (\w+)\. Then go to the (\w+) and give the \w+ to (\w+)\."
)


def walk(request: Request, seed: int | None) -> str:
    """Return a next action: the right one in half of the draws, else a walk somewhere."""
    turns = list(request.messages)
    start = max(i for i, m in enumerate(turns) if _ERRAND.search(m.content))
    errand = _ERRAND.search(turns[start].content)
    assert errand is not None
    thing_at, thing, person_at, person = errand.groups()
    seen = [m.content for m in turns[start + 1 :] if m.role == "user"]
    carries = any(f"You carry the {thing}" in text for text in seen)
    goal = person_at if carries else thing_at
    places = [place for text in seen for place in re.findall(r"You are in the (\w+)", text)]
    rng = random.Random(f"{seed}")
    if rng.random() < 0.5:
        return f'Action: go {{"place": "{rng.choice(PLACES)}"}}'
    if not places or places[-1] != goal:
        return f'Action: go {{"place": "{goal}"}}'
    if carries:
        return f'Action: give {{"thing": "{thing}", "person": "{person}"}}'
    return f'Action: take {{"thing": "{thing}"}}'


async def run(lm: LM, tasks: tuple[Task, ...] = TASKS, calls: int = 60) -> dict[str, list[bool]]:
    """Search each errand with A* and with one chain; return which were solved."""
    memory = PlanMemory()
    memory.add(["go", "take", "go", "give"], task_id="the worked example")
    solved: dict[str, list[bool]] = {"astar": [], "one chain": []}
    for task in tasks:
        for name in solved:
            print(f"{task.task_id}, {name} …", file=sys.stderr, flush=True)
            world = make_world(task)
            expander = LMExpander(
                lm,
                world.specs,
                form="text",
                describe_tools=False,
                sampling=Sampling(temperature=0.7, max_tokens=20),
            )
            result = await search_tree(
                task,
                CheckedExpander(expander, world.check),
                world,
                algorithm="astar" if name == "astar" else BestOfN(1),
                memory=memory,
                context=CONTEXT,
                settings=SearchSettings(samples=8, execution="eager", merge="any"),
                budget=Budget(expansions=15, calls=calls, depth=6),
            )
            solved[name].append(result.is_solved)
            if name == "astar":
                print(
                    f"{task.task_id}: {result.stop_reason}, {result.counters['expansions']} steps"
                )
                print(to_ascii(result.fold.tree, best=result.best.id, max_nodes=14))
                if result.is_solved:
                    memory.add(result.plan, task_id=task.task_id)
    return solved


async def main() -> None:
    """Run the errands with the scripted walker, or the model named on the command line."""
    lm = open_lm(sys.argv[1]) if len(sys.argv) > 1 else ScriptedLM(walk, model_id="scripted:walker")
    try:
        solved = await run(lm)
    finally:
        await lm.aclose()
    for name, marks in solved.items():
        print(f"{name}: {sum(marks)} of {len(marks)} solved")


if __name__ == "__main__":
    asyncio.run(main())
