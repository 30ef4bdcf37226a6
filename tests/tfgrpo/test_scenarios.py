"""Survival scenarios through the whole stack: settings, sockets, retries, journal, verdict."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import cli, command, environment, folder_with
from tests.learning.worlds import HELPFUL, Killed, World, comparable, journal, make_tasks, settings
from tfgrpo.learning.learn import dry_run, learn
from tfgrpo.learning.result import Result
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.store import Journal
from tfgrpo.testing import Answer, Call, FaultServer, choices, reset, say, status

TASKS = make_tasks()
REFUSED = {t.task_id for t in TASKS[::12]}


def task_of(call: Call) -> Task:
    """The task that a call is about: the one in its last message."""
    return next(t for t in TASKS if str(t.prompt) in call.text)


def answered(call: Call) -> Answer:
    """A right answer in half of the draws; nearly always below a worked example."""
    task = task_of(call)
    texts = []
    for i in range(call.n):
        drawn = derive_seed("draw", task.task_id, (call.seed or 0) + i) % 1000
        good = drawn < (950 if len(call.body["messages"]) > 2 else 500)
        texts.append(str(task.reference) if good else f"guess {drawn}")
    return choices(*texts)


def bad_hour(call: Call) -> Answer:
    """Rate limits with hints, a stretch of 503, resets in the body; some tasks always refused."""
    if task_of(call).task_id in REFUSED:
        return say("", finish="content_filter")
    draw = derive_seed("fault", call.key, call.seed) % 100
    if call.attempt == 0 and draw < 5:
        return status(429, retry_after="0.05")
    if 120 <= call.index < 150:
        return status(503)
    if call.attempt == 0 and draw >= 97:
        return reset(after=40)
    return answered(call)


def on(server: FaultServer, folder: Path, **sections: dict[str, Any]) -> Any:
    """Settings of a run against a server, learning worked examples."""
    changes = {
        "policy": {
            "lm": server.spec(),
            "options": {"supports_n": False},
            "sampling": {"temperature": 0.7, "max_tokens": 40},
        },
        "learn": {"batch": 12, "group_size": 4, "entries": "exemplars", "keep_share": 1.0},
        "run": {"concurrency": 16},
    }
    for name, values in sections.items():
        changes[name] = {**changes.get(name, {}), **values}
    return settings(folder, **changes)


@pytest.mark.real
def test_scenario_5_a_bad_hour_costs_time_and_no_score(tmp_path: Path) -> None:
    with FaultServer(bad_hour) as server:
        result = learn(on(server, tmp_path), tasks=TASKS)
    with FaultServer(lambda c: bad_hour(replace(c, attempt=1, index=0))) as calm:
        whole = learn(on(calm, tmp_path / "calm"), tasks=TASKS)
    faults: Counter[str] = Counter()
    for row in result.outcomes.values():
        faults.update(row)
    assert set(faults) == {"graded", "refused"}, "every passing fault was sat out"
    with journal(tmp_path) as store:
        groups = list(store.groups())
        spend = store.spend()
    for group in groups:
        refused = group.task.task_id in REFUSED
        assert {r.outcome for r in group.rollouts} == {"refused" if refused else "graded"}
        assert all((r.reward is None) == refused for r in group.rollouts)
    assert sum(row.failed_calls for row in spend) >= 30
    proof, calm_proof = result.learned.proof, whole.learned.proof
    assert proof is not None and calm_proof is not None
    blocked = [t.task_id for t in result.splits.test if t.task_id in REFUSED]
    assert blocked and all(not proof.empty[t] and not proof.final.get(t) for t in blocked)
    assert result.verdict is not None
    assert result.verdict.n_scored == len(result.splits.test) - len(blocked)
    assert proof.empty == calm_proof.empty and result.exit_code == whole.exit_code == 0
    assert proof.final == calm_proof.final


@pytest.mark.real
def test_scenario_6_a_wrong_key_or_model_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    from tfgrpo.errors import ProviderError

    for name, server in (
        ("key", FaultServer(status(401))),
        ("model", FaultServer(models=("another",))),
    ):
        with server, pytest.raises(ProviderError) as caught:
            learn(on(server, tmp_path / name), tasks=TASKS)
        assert caught.value.is_fatal and server.base_url in str(caught.value)
        assert server.call_count <= 5
        with journal(tmp_path / name) as store:
            assert not store.decisions("final")


@pytest.mark.real
def test_scenario_8_eight_draws_are_eight_and_a_rerun_returns_them_in_order(tmp_path: Path) -> None:
    with FaultServer(answered) as server:
        config = on(server, tmp_path, learn={"group_size": 8})
        first = learn(config, tasks=TASKS)
        asked = server.call_count
        assert not [k for k, n in Counter((c.key, c.seed) for c in server.calls).items() if n > 1]
        with journal(tmp_path) as store:
            before = {g.group_id: [r.answer for r in g.rollouts] for g in store.groups()}
            seeds = [[r.seed for r in g.rollouts] for g in store.groups("practice")]
        assert all(len(set(row)) == 8 for row in seeds)
        assert any(len(set(answers)) > 1 for answers in before.values())
        again = learn(config, tasks=TASKS)
        assert server.call_count == asked and comparable(again) == comparable(first)
        with journal(tmp_path) as store:
            assert {g.group_id: [r.answer for r in g.rollouts] for g in store.groups()} == before


def test_scenario_8_temperature_0_with_a_group_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        World().learn(settings(tmp_path, policy={"sampling": {"temperature": 0.0}}))
    assert "temperature 0 with group_size 4" in caplog.text


@pytest.mark.real
def test_scenario_10_a_cap_at_37_of_40_keeps_37_and_pays_three_more_on_resume(
    tmp_path: Path,
) -> None:
    with FaultServer(answered) as server:
        sections: dict[str, Any] = {
            "tasks": {"practice": 10, "gate": 0, "test": 6},
            "gate": {"enabled": False},
            "learn": {"batch": 10},
        }
        config = on(server, tmp_path, **sections, budget={"calls": 37})
        plan, _ = dry_run(config, tasks=TASKS)
        assert any("cap of 37 calls covers about" in note for note in plan.notes)
        result = learn(config, tasks=TASKS)
        assert result.exit_code == 4 and server.call_count == 37
        with Journal.open(tmp_path / "run", readonly=True) as store:
            ids = [f"{g}-{i}" for g in _practice_ids(tmp_path) for i in range(4)]
            assert sum(store.find_rollout(i, _verifier(store)) is not None for i in ids) == 37
        more = learn(on(server, tmp_path, **sections, budget={"calls": 500}), tasks=TASKS)
        assert server.call_count == 40 + 2 * 6 * 4 and more.exit_code == 0
        assert not [k for k, n in Counter((c.key, c.seed) for c in server.calls).items() if n > 1]


def _practice_ids(folder: Path) -> list[str]:
    with journal(folder) as store:
        rows = store._writer.read("SELECT DISTINCT group_id FROM rollouts")
    return [row[0] for row in rows]


def _verifier(store: Journal) -> str:
    return str(store._writer.read("SELECT verifier_id FROM rollouts LIMIT 1")[0][0])


def test_two_tasks_of_equal_text_and_different_answers_stay_two_groups(tmp_path: Path) -> None:
    world = World(answer=lambda request, seed: ("yes", "no")[(seed or 0) % 2])
    world.tasks = [
        Task(f"{answer}{i}", f"{t.prompt}", answer, {"split": "practice"})
        for i, t in enumerate(TASKS[:4])
        for answer in ("yes", "no")
    ]
    config = settings(
        tmp_path, tasks={"practice": None, "gate": 0, "test": 0}, gate={"enabled": False}
    )
    world.learn(config)
    with journal(tmp_path) as store:
        groups = list(store.groups("practice"))
    assert len(groups) == len({g.group_id for g in groups}) == 8
    by_answer = {str(g.task.reference): g.rewards_G for g in groups if g.task.task_id[-1] == "0"}
    assert set(by_answer) == {"yes", "no"}


def test_b03_ten_samples_killed_after_each_report_what_an_unkilled_run_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = TASKS[:10]

    def reply(request: Request, seed: int | None) -> Completion | str:
        index = next(
            i for i, t in enumerate(tasks) if str(t.prompt) in request.messages[-1].content
        )
        text = str(tasks[index].reference)
        return Completion(text, finish="length") if index in (1, 3) else text

    config = {
        "tasks": {"practice": 10, "gate": 0, "test": 0},
        "gate": {"enabled": False},
        "learn": {"batch": 10, "group_size": 1, "entries": "lessons"},
        "run": {"concurrency": 1, "probe": 0},
    }

    def run(folder: Path, fail_at: int) -> tuple[World, Result | None]:
        world = World(answer=reply, fail_at=fail_at, tasks=list(tasks))
        if not fail_at:
            return world, world.learn(settings(folder, **config))
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "close", Journal.abandon)
            with pytest.raises((Killed, BaseExceptionGroup)):
                world.learn(settings(folder, **config))
        return world, None

    _, whole = run(tmp_path / "whole", 0)
    assert whole is not None and whole.outcomes["practice"] == {"graded": 8, "truncated": 2}
    for kill in range(2, 11):
        folder = tmp_path / f"k{kill}"
        before, _ = run(folder, kill)
        after, result = run(folder, 0)
        assert result is not None
        assert result.outcomes == whole.outcomes and result.notes == whole.notes
        assert sum(before.draws.values()) == kill - 1
        assert sum(after.draws.values()) == 10 - (kill - 1), "what was finished is not asked again"
        ours, theirs = (
            [row.usage.to_dict() for row in r.spend if row.stage == "practice"]
            for r in (result, whole)
        )
        assert ours == theirs, kill


def test_b06_a_lesson_with_markers_reaches_the_policy_byte_for_byte(tmp_path: Path) -> None:
    odd = HELPFUL[:-1] + r', written as {"name": "demo"}, {foo}, $task, 100% and {{ x }} \d.'
    seen: list[str] = []

    class Watching(World):
        def _policy(self, request: Request, seed: int | None) -> Any:
            text = "\n".join(m.content for m in request.messages)
            if odd in text:
                seen.append(text)
            return super()._policy(request, seed)

    world = Watching(lesson=odd)
    world.learn(settings(tmp_path, learn={"settings": {"max_words": 60}}))
    assert seen and all(text.count(odd) == 1 for text in seen)


def test_f31_learn_works_in_a_worker_thread(tmp_path: Path) -> None:
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(World().learn(settings(tmp_path))))
    thread.start()
    thread.join(60)
    assert found and found[0].exit_code == 0


@pytest.mark.real
def test_f26_spaces_other_scripts_no_home_and_a_tight_umask_are_fine(tmp_path: Path) -> None:
    odd = tmp_path / "a folder, übung 练习"
    odd.mkdir()
    folder = folder_with(odd)
    env = environment(odd)
    del env["HOME"]
    line = [
        "sh",
        "-c",
        'umask 077; exec "$@"',
        "sh",
        *command("learn", str(folder / "config.toml")),
    ]
    done = subprocess.run(line, cwd=odd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and str(folder / "run") in done.stdout, done


@pytest.mark.real
def test_f25_a_full_disk_ends_with_6_and_the_run_goes_on_with_room(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    line = ["bash", "-c", 'ulimit -f 40; exec "$@"', "bash",
            *command("learn", str(folder / "config.toml"))]  # fmt: skip
    done = subprocess.run(
        line, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
    )
    assert done.returncode == 6 and str(folder / "run") in done.stderr, done
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 12
    ran = cli(folder, "learn", str(folder / "config.toml"), "--json")
    assert ran.code == 1, ran


@pytest.mark.real
def test_f32_the_width_stays_below_the_file_limit(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    with FaultServer(lambda call: str((call.seed or 0) % 3)) as server:
        words = ["learn", str(folder / "config.toml"), "--set", f'policy.lm="{server.spec()}"',
                 "--set", "run.concurrency=500"]  # fmt: skip
        line = ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash", *command(*words)]
        done = subprocess.run(
            line, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
        )
    assert done.returncode in (0, 1) and "concurrency 500 cut to 96" in done.stderr, done


def test_the_package_starts_without_third_party_modules() -> None:
    code = (
        "import sys, tfgrpo; print([m for m in ('numpy', 'pydantic', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
