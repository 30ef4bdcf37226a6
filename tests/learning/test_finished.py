"""A finished run is read back as a whole where nothing can have changed, and run again elsewhere.

Whether it was run again is told by the groups that were asked for, which a rerun finds in the
journal one by one.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.learning.worlds import World, comparable, journal, settings
from tfgrpo import prompts
from tfgrpo.config.learn import Config
from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.learning import experience_settings, finished
from tfgrpo.learning.learn import learn
from tfgrpo.learning.result import Result
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.sampling import Sampler, Stop, Stopped
from tfgrpo.store import Journal
from tfgrpo.store.disk.database import DatabaseWriter
from tfgrpo.store.export import write_groups
from tfgrpo.verifiers import Exact


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The stages of which groups were asked for, in order."""
    stages: list[str] = []
    groups = Sampler.groups

    async def counted(self: Sampler, tasks: Any, draws: Any = None, *rest: Any, **more: Any) -> Any:
        stages.append(draws.stage)
        return await groups(self, tasks, draws, *rest, **more)

    monkeypatch.setattr(Sampler, "groups", counted)
    yield stages


def config_of(folder: Path, **sections: Any) -> Config:
    """A run with worked examples and lessons, two of its versions accepted or tried."""
    return settings(folder, **{"learn": {"entries": "both", "epochs": 2}, **sections})


def done(world: World, folder: Path, asked: list[str], **sections: Any) -> Result:
    """Finish a run and forget what it asked for."""
    result = world.learn(config_of(folder, **sections))
    asked.clear()
    return result


@pytest.mark.parametrize("entries", ["lessons", "exemplars", "both"])
@pytest.mark.parametrize("top_k", [0, 1])
def test_a_finished_run_is_read_back_without_a_look_at_its_rollouts(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, entries: str, top_k: int
) -> None:
    world, learn = World(turns_help=True), {"entries": entries, "epochs": 2, "top_k": top_k}
    first = done(world, tmp_path, asked, learn=learn)
    calls = world.calls
    again = world.learn(config_of(tmp_path, learn=learn))
    assert asked == [] and world.calls == calls
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", lambda self, key: None)
        through = world.learn(config_of(tmp_path, learn=learn))
    assert asked and world.calls == calls
    assert comparable(again) == comparable(through) == comparable(first)
    for found in (again.learned, through.learned):
        assert found.proof == first.learned.proof and found.looks == first.learned.looks
        assert found.choice == first.learned.choice and found.notes == first.learned.notes
        assert found.version.version_id == first.learned.version.version_id
        assert [v.library for v in found.accepted] == [v.library for v in first.learned.accepted]


def test_what_reading_back_takes_does_not_grow_with_the_rollouts_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    plain = DatabaseWriter.read

    def counted(self: DatabaseWriter, sql: str, values: tuple[Any, ...] = ()) -> Any:
        found = plain(self, sql, values)
        rows.append(len(found))
        return found

    monkeypatch.setattr(DatabaseWriter, "read", counted)
    taken: list[int] = []
    for size in (2, 8):
        world, learn = World(), {"entries": "exemplars", "group_size": size}
        world.learn(config_of(tmp_path / str(size), learn=learn))
        rows.clear()
        world.learn(config_of(tmp_path / str(size), learn=learn))
        taken.append(sum(rows))
    assert taken[1] <= taken[0] + 20


def test_a_deleted_artefact_is_written_again(tmp_path: Path, asked: list[str]) -> None:
    world = World()
    done(world, tmp_path, asked)
    file = tmp_path / "run" / "library.json"
    before = file.read_text()
    file.unlink()
    world.learn(config_of(tmp_path))
    assert asked == [] and file.read_text() == before


def test_a_moved_run_and_another_width_are_read_back_too(tmp_path: Path, asked: list[str]) -> None:
    world = World()
    first = done(world, tmp_path, asked)
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = {"folder": str(tmp_path / "moved"), "concurrency": 7, "timeout_s": 5.0}
    again = world.learn(config_of(tmp_path, run=moved))
    assert asked == [] and again.folder == tmp_path / "moved"
    assert comparable(again) == comparable(first)


def test_a_run_that_a_cap_ended_goes_on_and_is_read_back_once_it_is_done(
    tmp_path: Path, asked: list[str]
) -> None:
    world = World()
    capped = done(world, tmp_path, asked, budget={"calls": 100})
    assert capped.exit_code == 4
    assert world.learn(config_of(tmp_path, budget={"calls": 100})).exit_code == 4 and asked
    whole = done(world, tmp_path, asked, budget={"calls": 1000})
    assert whole.exit_code != 4
    world.learn(config_of(tmp_path, budget={"calls": 1000}))
    assert asked == []


def test_changed_tasks_and_settings_are_refused_as_ever(tmp_path: Path, asked: list[str]) -> None:
    world = World()
    done(world, tmp_path, asked)
    with pytest.raises(ConfigError, match=r"gate\.group_size"):
        world.learn(config_of(tmp_path, gate={"group_size": 5}))
    world.tasks = world.tasks[:-1]
    with pytest.raises(ConfigError, match=r"tasks\.content"):
        world.learn(config_of(tmp_path, tasks={"practice": 12, "gate": 12, "test": 11}))


class _Other(ScriptedLM):
    @property
    def identity(self) -> dict[str, Any]:
        return {**super().identity, "server": "another"}


def test_another_model_under_the_same_name_is_asked(tmp_path: Path, asked: list[str]) -> None:
    for role in ("policy", "critic"):
        world = World()
        done(world, tmp_path / role, asked)
        calls, opener = world.calls, world.opener

        def other(spec: str, role: str = role, opener: Any = opener, **options: Any) -> Any:
            lm = opener(spec)
            return _Other(lm._script, model_id=spec) if role in spec else lm

        world.opener = other  # type: ignore[method-assign]
        world.learn(config_of(tmp_path / role))
        assert asked and world.calls > calls


def test_another_prompt_goes_through_the_run(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    done(world, tmp_path, asked)
    calls, load = world.calls, prompts.load
    changed = lambda name: load(name) + "\nBe brief." * (name == "critic_panel")  # noqa: E731
    monkeypatch.setattr(prompts, "load", changed)
    world.learn(config_of(tmp_path))
    assert asked and world.calls > calls


def test_groups_that_were_there_before_are_compared_by_what_they_hold(
    tmp_path: Path, asked: list[str]
) -> None:
    world = World(turns_help=True)
    done(world, tmp_path / "first", asked)
    with journal(tmp_path / "first") as store:
        groups = list({g.task.task_id: g for g in store.groups("practice")}.values())
    traces = tmp_path / "traces.jsonl"
    write_groups(traces, groups)
    held = [t for t in world.tasks if t.task_id not in {g.task.task_id for g in groups}]
    config = config_of(
        tmp_path, tasks={"practice": None, "gate": 12, "test": 12, "traces": str(traces)}
    )
    learn(config, tasks=held, opener=world.opener)
    asked.clear()
    learn(config, tasks=held, opener=world.opener)
    assert asked == []
    rows = [json.loads(line) for line in traces.read_text().splitlines()]
    for rollout in (r for row in rows for r in row["rollouts"]):
        rollout["score"]["reward"] = 1.0 - rollout["score"]["reward"]
    traces.write_text("".join(json.dumps(row) + "\n" for row in rows))
    learn(config, tasks=held, opener=world.opener)
    assert asked


def test_another_best_reward_of_a_range_without_end_goes_through_the_run(
    tmp_path: Path, asked: list[str]
) -> None:
    class Open(Exact):
        reward_range = (-math.inf, 1.0)

    world = World(turns_help=True)
    for best, is_asked in ((1.0, True), (1.0, False), (2.0, True)):
        Open.reward_range = (-math.inf, best)
        asked.clear()
        world.learn(config_of(tmp_path), verifier=Open())
        assert bool(asked) == is_asked


def test_other_tools_that_the_critic_is_told_of_go_through_the_run(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    done(world, tmp_path, asked)
    make = experience_settings.experience_settings
    told = lambda config: replace(make(config), agent="a calculator")  # noqa: E731
    monkeypatch.setattr(experience_settings, "experience_settings", told)
    world.learn(config_of(tmp_path))
    assert asked


def test_weights_that_may_change_under_their_name_keep_nothing() -> None:
    kinds = {"hashed": True, "minilm": True, "sentence:/tmp/m": False, "all-MiniLM-L6-v2": False}
    found = {
        k: finished.has_fixed_embedder(Config.from_mapping({"learn": {"embedder": k}}))
        for k in kinds
    }
    assert found == kinds


def add_decision(store: Journal) -> None:
    store.record_decision("edited", {"version_id": "x", "parent": "y"}, key="x")


def add_library(store: Journal) -> None:
    store.record_library("x", {"any": "thing"})


def set_aside(store: Journal) -> None:
    store._values.set_aside("rollouts", 3, "does not match its digest")


@pytest.mark.parametrize("change", [add_decision, add_library, set_aside])
def test_what_was_added_to_the_journal_is_seen(
    tmp_path: Path, asked: list[str], change: Callable[[Journal], None]
) -> None:
    world = World()
    done(world, tmp_path, asked)
    with Journal.open(tmp_path / "run") as store:
        change(store)
    world.learn(config_of(tmp_path))
    assert asked


def test_rollouts_that_another_program_deleted_are_made_again(
    tmp_path: Path, asked: list[str]
) -> None:
    world = World()
    first = done(world, tmp_path, asked)
    with sqlite3.connect(tmp_path / "run" / "run.db") as connection:
        connection.execute("DELETE FROM rollouts WHERE rollout = 3")
        connection.execute("DELETE FROM completions WHERE completion = 3")
    connection.close()
    calls = world.calls
    again = world.learn(config_of(tmp_path))
    assert asked and world.calls == calls + 1
    assert again.learned.proof == first.learned.proof


def test_a_journal_without_checksums_is_not_believed(tmp_path: Path, asked: list[str]) -> None:
    world = World()
    done(world, tmp_path, asked)
    (tmp_path / "run" / "run.db-sums").unlink()
    world.learn(config_of(tmp_path))
    assert asked
    asked.clear()
    world.learn(config_of(tmp_path))
    assert asked == []


def test_a_damaged_journal_is_gone_through(tmp_path: Path, asked: list[str]) -> None:
    world = World()
    done(world, tmp_path, asked)
    file = tmp_path / "run" / "run.db"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    raw[len(raw) // 2 + 9] ^= 4
    file.write_bytes(raw)
    world.learn(config_of(tmp_path))
    assert asked


def test_test_rollouts_that_failed_are_tried_again(tmp_path: Path, asked: list[str]) -> None:
    world = World(fail_test_call=5)
    first = done(world, tmp_path, asked)
    assert first.outcomes["test"].get("provider_failed") == 1
    calls = world.calls
    again = world.learn(config_of(tmp_path))
    assert asked and world.calls == calls + 1
    assert "provider_failed" not in again.outcomes["test"]
    asked.clear()
    assert comparable(world.learn(config_of(tmp_path))) == comparable(again)
    assert asked == []


def test_a_call_of_the_critic_that_failed_is_tried_again(tmp_path: Path, asked: list[str]) -> None:
    world = World()
    plain = world._critic
    failed: list[Any] = []

    def fails_once(request: Any, seed: int | None) -> Any:
        reply = plain(request, seed)
        if not failed:
            failed.append(request)
            return ProviderError("the answer is not to be had", kind="bad_request")
        return reply

    world._critic = fails_once  # type: ignore[method-assign]
    done(world, tmp_path, asked)
    assert failed
    calls = world.calls
    world.learn(config_of(tmp_path))
    assert asked and world.calls > calls


def test_a_stop_is_heard_before_anything_is_read_back(tmp_path: Path, asked: list[str]) -> None:
    world = World()
    done(world, tmp_path, asked)
    stop = Stop()
    stop.request()
    with pytest.raises(Stopped):
        world.learn(config_of(tmp_path), stop=stop)


def test_an_allocator_of_the_caller_is_asked_again(tmp_path: Path, asked: list[str]) -> None:
    world = World()

    def even(tasks: Any, history: Any, budget: int) -> list[int]:
        return [budget // len(tasks)] * len(tasks)

    world.learn(config_of(tmp_path), allocate=even)
    asked.clear()
    world.learn(config_of(tmp_path), allocate=even)
    assert asked


def test_a_value_whose_digest_does_not_fit_is_as_if_it_were_not_there(
    tmp_path: Path, asked: list[str]
) -> None:
    world = World()
    done(world, tmp_path, asked)
    with Journal.open(tmp_path / "run") as store:
        text = store.writer.read("SELECT value FROM meta WHERE name = 'finish'")[0][0]
        store.writer.commit_now([("INSERT INTO meta VALUES (?, ?)", ("finish", text[:-1] + " "))])
    world.learn(config_of(tmp_path))
    assert asked


def test_a_library_that_a_secret_was_removed_from_is_made_again(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, row = World(), finished._row

    def redacted(learned: Any) -> dict[str, Any]:
        found = row(learned)
        found["version"]["library"]["version_id"] = "v0000"
        return found

    monkeypatch.setattr(finished, "_row", redacted)
    done(world, tmp_path, asked)
    world.learn(config_of(tmp_path))
    assert asked
