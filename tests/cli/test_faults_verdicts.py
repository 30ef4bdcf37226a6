"""What machines read: JUnit, JSON and reports say the same, whatever happened."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.command_line import folder_with, here
from tests.learning.worlds import HELPFUL, World, settings
from tfgrpo.context import Context
from tfgrpo.errors import ConfigError, PolicyError
from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, Step, Task
from tfgrpo.runtime.texts.text_lines import numbered_lines
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings
from tfgrpo.search.event_log import FileLog
from tfgrpo.statistics.verdict import Verdict, VerdictRule, reach_verdict
from tfgrpo.store.export import read_groups
from tfgrpo.testing import Answer, FaultServer, ReplayLM, say, status
from tfgrpo.verifiers.exact import Exact

# --- JUnit ----------------------------------------------------------------------------------------


@given(
    scores=st.dictionaries(st.text("ab", min_size=1), st.lists(st.floats(0, 1), max_size=3)),
    rule=st.sampled_from(
        [VerdictRule("mean", 0.5), VerdictRule("each", 0.5), VerdictRule("share", 0.5, 0.5)]
    ),
    attempted=st.integers(0, 40),
)
def test_junit_passes_nothing_that_is_not_met(
    scores: dict[str, list[float]], rule: VerdictRule, attempted: int
) -> None:
    verdict = reach_verdict(scores, rule, n_attempted=attempted)
    suite = ElementTree.fromstring(verdict.to_junit())
    found = [suite.get(n) for n in ("tests", "failures", "errors", "skipped")]
    wanted = {"met": ["1", "0", "0", "0"], "not_met": ["1", "1", "0", "0"],
              "inconclusive": ["1", "0", "1", "0"]}  # fmt: skip
    assert found == wanted[verdict.status]
    case = suite.find("testcase")
    assert case is not None
    tags = {"met": "system-out", "not_met": "failure", "inconclusive": "error"}
    assert [child.tag for child in case] == [tags[verdict.status]]


@given(st.text(max_size=40))
def test_junit_is_xml_whatever_the_reason_holds(reason: str) -> None:
    verdict = Verdict(VerdictRule("mean", 0.5), "inconclusive", None, 0, 0, 1, False, reason)
    ElementTree.fromstring(verdict.to_junit())


# --- eval --json ----------------------------------------------------------------------------------


def run_eval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: Any, config: str = "", **server: Any
) -> tuple[Any, int]:
    with FaultServer(script, **server) as running:
        spec = running.spec()
        folder = folder_with(tmp_path, f'[policy]\nlm = "{spec}"\n{config}')
        library = write_library(folder)
        ran = here(
            capsys, "eval", str(folder / "config.toml"), str(library), "--json", "--group-size", "1"
        )
    return json.loads(ran.out), ran.code


def write_library(folder: Path) -> Path:
    World(lesson=HELPFUL).learn(settings(folder / "taught"))
    return folder / "taught" / "run"


@pytest.mark.parametrize(
    ("script", "options", "code"),
    [
        (say("x"), {"api_key": "another"}, 3),
        (say("x"), {"models": ["other"]}, 3),
        (status(429, {"error": {"code": "insufficient_quota"}}), {}, 3),
        (status(400, {"error": {"message": "no"}}), {}, 5),
        (say("1", finish="abort"), {}, 5),
    ],
    ids=["401", "404", "quota", "400", "abort"],
)
def test_eval_prints_json_whatever_the_provider_does(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    script: Answer,
    options: dict[str, Any],
    code: int,
) -> None:
    row, ended = run_eval(tmp_path, capsys, script, "[run]\nretry_deadline_s = 0.1", **options)
    assert ended == code and row["verdict"] is None and row["error"]["message"]
    assert row["schema"] == 1 and row["empty"] is None and row["library"] is None


def test_eval_prints_json_for_a_wrong_config_and_for_what_could_not_be_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = here(capsys, "eval", str(tmp_path / "none.toml"), "nowhere", "--json")
    row = json.loads(ran.out)
    assert ran.code == 2 and row["verdict"] is None and row["error"]["type"] == "ConfigError"
    ran = here(capsys, "learn", str(tmp_path / "none.toml"), "--json")
    assert ran.code == 2


# --- the order of tasks ---------------------------------------------------------------------------


class Choosy:
    """A policy that fails on some tasks."""

    policy_id = "choosy"

    def __init__(self, bad: set[str]) -> None:
        self.bad = bad
        self.attempts = 0

    async def attempt(self, task: Task, context: Context, seed: int) -> Rollout:
        self.attempts += 1
        await asyncio.sleep(0)
        if task.task_id in self.bad:
            raise PolicyError("this task is refused")
        return Rollout("", task.task_id, (Step(Message("assistant", "4")),))


@given(
    order=st.permutations(range(12)),
    bad=st.sets(st.integers(0, 11), max_size=12),
    width=st.sampled_from([1, 4, 32]),
)
def test_the_order_of_tasks_decides_nothing(order: list[int], bad: set[int], width: int) -> None:
    def outcome(places: list[int]) -> Any:
        tasks = [Task(f"t{i}", f"{i}", "4") for i in places]
        policy = Choosy({f"t{i}" for i in bad})
        sampler = Sampler(policy, Exact(), SampleSettings(concurrency=width, probe=1))
        try:
            groups = asyncio.run(sampler.groups(tasks, GroupSpec(group_size=3)))
        except PolicyError as exc:
            return str(exc).partition(":")[0]
        return sorted((g.task.task_id, [r.outcome for r in g.rollouts]) for g in groups)

    assert outcome(order) == outcome(sorted(order))


def test_one_task_that_always_fails_ends_no_run_wherever_it_stands() -> None:
    for place in range(8):
        tasks = [Task(f"t{i}", f"{i}", "4") for i in range(8)]
        policy = Choosy({f"t{place}"})
        groups = asyncio.run(Sampler(policy, Exact()).groups(tasks, GroupSpec(group_size=8)))
        assert sum(bool(g.rewards_G) for g in groups) == 7


def test_a_policy_that_fails_everywhere_still_ends_after_a_handful_of_attempts() -> None:
    tasks = [Task(f"t{i}", f"{i}", "4") for i in range(40)]
    policy = Choosy({t.task_id for t in tasks})
    with pytest.raises(PolicyError, match="first 5 rollouts all failed alike"):
        asyncio.run(Sampler(policy, Exact()).groups(tasks, GroupSpec(group_size=8)))
    assert policy.attempts <= 8


# --- lines ----------------------------------------------------------------------------------------


@given(st.lists(st.text(st.characters(exclude_characters="\n"), min_size=1), max_size=8))
def test_lines_end_at_line_feeds_alone(lines: list[str]) -> None:
    text = "".join(line + "\n" for line in lines)
    wanted = [line.removesuffix("\r") for line in lines]
    assert [line for _, line, _ in numbered_lines(text)] == [w for w in wanted if w.strip()]
    assert all(is_whole for *_, is_whole in numbered_lines(text))


def test_a_recording_with_odd_line_characters_is_read_and_a_cut_one_names_its_line(
    tmp_path: Path,
) -> None:
    row = {"key": "k", "model_id": "m", "messages": [], "seed": 1,
           "reply": {"text": "a\u2028b\x85c\x0cd", "finish": "stop", "usage": {}}}  # fmt: skip
    path = tmp_path / "recording.jsonl"
    line = json.dumps(row, ensure_ascii=False)
    path.write_bytes((line + "\n" + line + "\n").encode())
    assert ReplayLM(path).model_id == "m"
    path.write_bytes((line + "\n" + line[:40]).encode())
    with pytest.raises(ConfigError, match=r"line 2: .*cut off"):
        ReplayLM(path)


def test_a_cut_line_of_a_search_log_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "created"}\n{"event": "sel')
    assert len(FileLog(path).events()) == 1
    assert "line 2 is cut off" in caplog.text
    path.write_bytes(b'{"event": "created"}\nnonsense\n')
    with pytest.raises(Exception, match="line 2"):
        FileLog(path)


def test_a_cut_line_of_exported_groups_names_its_number(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text('{"group_id": "g')
    with pytest.raises(ConfigError, match="line 1"):
        list(read_groups(path))


# --- reports of every kind of run -----------------------------------------------------------------


def test_the_report_of_an_eval_run_says_what_eval_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, _ = run_eval(tmp_path, capsys, lambda call: say(str(call.index % 3)))
    folder = tmp_path / "project" / "run-eval"
    ran = here(capsys, "report", str(folder), "--format", "json")
    found = json.loads(ran.out)
    assert found["verdict"]["text"] == row["verdict"]["text"]
    assert {a["arm"] for a in found["arms"]} == {"empty", "final"}
    assert len(found["tasks"]) == len(row["empty"])
    assert row["verdict"]["text"] in here(capsys, "report", str(folder), "--format", "md").out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["learn", "none.toml"], 2),
        (["escalate", "none"], 6),
        (["advise", "none"], 6),
        (["eval", "none.toml", "nowhere", "--group-size", "0"], 2),
        (["learn", "none.toml", "--no-such-option"], 2),
        (["models", "--check", "scripted:nothing"], 2),
    ],
)
def test_every_command_with_json_prints_an_object_where_it_fails(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = here(capsys, *arguments, "--json")
    row = json.loads(ran.out)
    assert ran.code == code and row["verdict"] is None and row["error"]["message"]
    assert here(capsys, *arguments).out == ""


@pytest.mark.parametrize("form", [["--format", "json"], ["-f", "json"], ["--format=json"]])
def test_a_report_in_json_prints_an_object_where_there_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    ran = here(capsys, "report", str(tmp_path / "none"), *form)
    row = json.loads(ran.out)
    assert ran.code == 6 and row["verdict"] is None and row["error"]["message"]
