"""A whole run on workers: the same result as in one process, also where the place changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.learning.worlds import Killed, World, comparable, settings
from tfgrpo.config.learn import Config
from tfgrpo.errors import ConfigError
from tfgrpo.learning.components import RunComponents
from tfgrpo.learning.evaluate import evaluate
from tfgrpo.learning.learn import Overrides, make_sampler, open_run, run_workers
from tfgrpo.learning.progress import QuietView
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import ToolCall
from tfgrpo.policies.chat import FunctionPolicy
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Task, Usage
from tfgrpo.sampling import GroupSpec
from tfgrpo.store import Journal

pytestmark = [pytest.mark.real, pytest.mark.skipif(os.name == "nt", reason="Unix sockets")]
pytest.importorskip("aiohttp")

ON_WORKERS = {"executor": "processes", "concurrency": 8}


def made(folder: Path) -> dict[str, Any]:
    """Everything that a run's journal holds, without times."""
    with Journal.open(folder / "run", readonly=True) as store:
        groups = [g.to_dict() for g in store.groups()]
        spend = [(r.stage, r.model, r.usage, r.booked) for r in store.spend()]
    for group in groups:
        for rollout in group["rollouts"]:
            rollout.pop("duration_s", None)
    return {
        "groups": {(g["group_id"], str(g["metadata"])): g for g in groups},
        "spend": sorted(map(str, spend)),
    }


def test_a_run_on_worker_processes_finds_and_pays_the_same(tmp_path: Path) -> None:
    here, there = World(), World()
    local = here.learn(settings(tmp_path / "a"))
    workers = {"count": 2}
    on_workers = there.learn(settings(tmp_path / "b", run={**ON_WORKERS, "folder": str(
        tmp_path / "b" / "run")}, workers=workers))  # fmt: skip
    assert comparable(on_workers) == comparable(local)
    assert made(tmp_path / "b") == made(tmp_path / "a")
    assert there.draws == here.draws and set(there.draws.values()) == {1}


def test_a_run_goes_on_in_another_place(tmp_path: Path) -> None:
    whole, world = World(), World()
    expected = whole.learn(settings(tmp_path / "a"))
    run = {"folder": str(tmp_path / "b" / "run")}
    world.fail_at = 60
    with pytest.raises((Killed, BaseExceptionGroup)):
        world.learn(settings(tmp_path / "b", run={**run, "concurrency": 4}))
    world.fail_at = 0
    result = world.learn(settings(tmp_path / "b", run={**run, **ON_WORKERS}, workers={"count": 1}))
    assert result.library == expected.library
    assert result.verdict == expected.verdict
    answered = [n for n in world.draws.values() if n > 1]
    assert len(answered) <= 4  # those in flight when it was killed
    artefact = tmp_path / "b" / "run" / "library.json"
    scored = [
        evaluate(
            settings(tmp_path / name, run={"folder": str(tmp_path / name / "run"), **run_on},
                     workers={"count": 1}),
            artefact, tasks=world.tasks[:6], opener=world.opener,
        )
        for name, run_on in (("c", {}), ("d", ON_WORKERS))
    ]  # fmt: skip
    assert scored[0] == scored[1]


def test_what_workers_cannot_serve_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    world = World()
    policy = FunctionPolicy(lambda prompt, context: "x", policy_id="mine")
    on_workers = settings(tmp_path, run={**ON_WORKERS, "folder": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="was given as an object"):
        world.learn(on_workers, policy=policy)
    no_cache = settings(tmp_path / "2", run={**ON_WORKERS, "cache": False})
    with pytest.raises(ConfigError, match=r"needs run.cache"):
        world.learn(no_cache)
    assert world.calls == 0


async def test_tools_judges_and_practice_draws_are_the_same_on_workers(tmp_path: Path) -> None:
    def opener(spec: str, **options: Any) -> ScriptedLM:
        def policy(request: Request, seed: int | None) -> Completion | str:
            if request.messages[-1].role == "tool":
                return f"{request.messages[-1].content} ones, at {request.sampling.temperature}"
            text = request.messages[-1].content
            call = ToolCall("c1", "count_ones", json.dumps({"text": text}))
            return Completion("", "tool_calls", tool_calls=(call,), usage=Usage(calls=1))

        def judge(request: Request, seed: int | None) -> str:
            return "As told.\nScore: 80"

        return ScriptedLM(judge if "judge" in spec else policy, model_id=spec)

    made = {}
    for executor in ("local", "processes"):
        config = Config.from_mapping(
            {
                "run": {"folder": str(tmp_path / executor), "executor": executor},
                "workers": {"count": 1},
                "policy": {"lm": "scripted:p", "kind": "tools",
                           "tools": ["tests.workers.worlds:count_ones"]},
                "practice": {"sampling": {"temperature": 0.5}},
                "judge": {"lm": "scripted:judge", "sampling": {"max_tokens": 99}},
                "verifier": {"kind": "judge", "rubric": "Is it a count?"},
            }
        )  # fmt: skip
        with open_run(config) as store:
            roles = RunComponents(config, store, opener)
            async with run_workers(config, roles) as workers:
                groups = []
                for practice in (False, True):
                    sampler = make_sampler(
                        config, roles, Overrides(), store, QuietView(),
                        practice=practice, workers=workers,
                    )  # fmt: skip
                    tasks = [Task("a", "How many in 101?", "2"), Task("b", "And in 1?", "1")]
                    groups += await sampler.groups(tasks, GroupSpec(group_size=2))
            spent = store.ledger.spent | {"seconds": 0.0}
        rows = [g.to_dict() for g in groups]
        for rollout in (r for row in rows for r in row["rollouts"]):
            rollout.pop("duration_s")
        made[executor] = (rows, spent)
    rows, spent = made["local"]
    assert made["processes"] == made["local"]
    assert spent["calls"] == 8 * 3  # a call with a tool, the answer, and the judge's
    assert {r["score"]["reward"] for row in rows for r in row["rollouts"]} == {0.8}
    assert "ones, at 0.5" in str(rows[2]) and "ones, at None" in str(rows[0])
