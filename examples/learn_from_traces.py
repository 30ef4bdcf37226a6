"""Learn from attempts that were paid for long ago: saved traces, no fresh rollouts.

    python examples/learn_from_traces.py                          offline, a scripted critic
    python examples/learn_from_traces.py --lm openai:MODEL        a real critic
    python examples/learn_from_traces.py --traces my_groups.jsonl

A trace file holds one `RolloutGroup` a line: a task, its rollouts with their steps, outcomes and
scores. Without `--traces` the example converts 200 recorded runs of an airline agent (tau-bench,
Yao et al., 2024: 50 tasks, 4 runs each) where the folder named by TFGRPO_SHARED holds them, else
it writes a few groups of its own. `read_groups` and `write_groups` also speak Parquet.

What comes out was never tried: without tasks of its own a library stays unproven. Give `tasks.path`
beside `tasks.traces`, and a gate and a test split judge it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfgrpo import Config, Result, Rollout, RolloutGroup, Score, Task, learn, open_lm
from tfgrpo.messages import Message, ToolCall
from tfgrpo.protocols import LM, Request
from tfgrpo.rollout import Step
from tfgrpo.store import read_groups, write_groups
from tfgrpo.testing import ScriptedLM

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("TFGRPO_SHARED", ROOT / ".." / "shared"))
AIRLINE = SHARED / "data" / "search" / "taubench_airline" / "gpt4o_trajectories.jsonl.gz"


def message_of(row: dict[str, Any]) -> Message:
    """Return one recorded chat turn in the form of OpenAI's API."""
    calls = tuple(
        ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"])
        for c in row.get("tool_calls") or ()
    )
    return Message(row["role"], row.get("content") or "", calls, row.get("tool_call_id") or "")


def rollout_of(task_id: str, trial: int, turns: Sequence[Message], reward: float) -> Rollout:
    """Return one recorded run: each action with what came back."""
    steps: list[Step] = []
    for turn in turns:
        if turn.role == "assistant":
            steps.append(Step(turn))
        elif steps:
            last = steps[-1]
            steps[-1] = Step(last.action, (*last.observations, turn))
    return Rollout(
        f"{task_id}-{trial}", task_id, tuple(steps), "graded", Score(reward), sample_index=trial
    )


def airline_groups(path: Path) -> Iterator[RolloutGroup]:
    """Yield one group a task: its four recorded runs."""
    runs: dict[str, list[Rollout]] = {}
    prompts: dict[str, str] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            task_id = f"airline-{row['task_id']}"
            first, *turns = [message_of(m) for m in row["messages"]]
            prompts.setdefault(task_id, first.content)
            rollout = rollout_of(task_id, row["trial"], turns, row["reward"])
            runs.setdefault(task_id, []).append(rollout)
    for task_id, rollouts in runs.items():
        yield RolloutGroup(f"traces-{task_id}", Task(task_id, prompts[task_id]), tuple(rollouts))


def own_groups() -> Iterator[RolloutGroup]:
    """Yield groups where those who looked before they booked did well."""
    for i, place in enumerate(("Oslo", "Lima", "Kyoto", "Accra", "Turin", "Quito")):
        task = Task(f"trip-{i}", f"Book me a seat to {place} next week, please.")
        rollouts = []
        for trial in range(4):
            looked = trial % 2 == 0
            done = "I compared the flights and booked the cheapest." if looked else "Booked."
            name = "search_flights" if looked else "book_flight"
            asked = ToolCall(f"c{trial}", name, json.dumps({"to": place}))
            turns = [
                Message("assistant", "", (asked,)),
                Message("tool", "ok", tool_call_id=f"c{trial}"),
                Message("assistant", done),
            ]
            rollouts.append(rollout_of(task.task_id, trial, turns, float(looked)))
        yield RolloutGroup(f"traces-{task.task_id}", task, tuple(rollouts))


def scripted(spec: str, **options: Any) -> LM:
    """Stand in for `open_lm`: one lesson for every contrast, a plain account for every summary."""
    lesson = "Search for all the options and confirm one before anything is booked or changed"

    def reply(request: Request, seed: int | None) -> str:
        if '"lessons"' in request.messages[-1].content:
            return json.dumps({"lessons": [{"lesson": lesson, "attempts": [1]}]})
        return "The agent called its tools and answered."

    return ScriptedLM(reply, model_id="scripted:critic")


def main(arguments: Sequence[str] | None = None) -> Result:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lm", default="", help="spec of a real critic; scripted without")
    parser.add_argument("--traces", type=Path, help="JSONL or Parquet of groups")
    parser.add_argument("--folder", type=Path, default=Path("runs/traces"))
    asked = parser.parse_args(arguments)
    traces = asked.traces
    if traces is None:
        asked.folder.mkdir(parents=True, exist_ok=True)
        traces = asked.folder / "groups.jsonl"
        n = write_groups(traces, airline_groups(AIRLINE) if AIRLINE.is_file() else own_groups())
        print(f"wrote {n} groups to {traces}")
    teaching = sum(g.is_informative() for g in read_groups(traces))
    print(f"{teaching} groups hold attempts of different reward: only those can teach")
    flow = "default" if asked.lm else "contrast"
    config = Config.from_mapping(
        {
            "run": {"folder": str(asked.folder / "run")},
            "tasks": {"traces": str(traces)},
            "policy": {"lm": asked.lm or "scripted:critic"},  # the critic takes the policy's
            # the scripted critic compares one group at a time
            "learn": {"entries": "lessons", "batch": 10, "preset": flow},
        }
    )
    result = learn(config, opener=open_lm if asked.lm else scripted)
    for entry in result.library.shown:
        seen = len(entry.provenance.rollout_ids)
        print(f"kept {entry.experience_id} (from {seen} rollouts): {entry.body}")
    print(f"{result.learned.choice.reason}; ready to paste: {result.folder / 'prompt.txt'}")
    return result


if __name__ == "__main__":
    raise SystemExit(main().exit_code)
