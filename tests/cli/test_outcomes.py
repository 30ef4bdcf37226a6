"""The verbs of the README after each outcome: kept, not kept, nothing to learn, stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command_line import folder_with, here
from tests.learning.worlds import HARMFUL, HELPFUL, Killed, World, settings
from tfgrpo.experience import load_artefact
from tfgrpo.learning.result import Result
from tfgrpo.runtime.redaction import forget_secrets
from tfgrpo.store import Journal
from tfgrpo.testing import FaultServer, status

NOT_KEPT = "candidate, not kept"


def config_of(tmp_path: Path, world: World) -> Path:
    """Write the world's tasks and settings as a user has them; its models stay scripted."""
    rows = [
        {"task_id": t.task_id, "prompt": t.prompt, "reference": t.reference} for t in world.tasks
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "config.toml"
    path.write_text(
        f'[run]\nfolder = "{tmp_path / "run"}"\n[tasks]\npath = "t.jsonl"\npractice = 12\n'
        'gate = 12\ntest = 12\n[policy]\nlm = "scripted:digits"\n[verifier]\nkind = "exact"\n'
    )
    return path


def run(tmp_path: Path, world: World) -> Result:
    return world.learn(settings(tmp_path))


def test_after_a_kept_library_each_verb_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path, World(lesson=HELPFUL))
    folder = str(tmp_path / "run")
    shown = here(capsys, "library", "show", folder)
    assert shown.code == 0 and shown.out.startswith("kept: ")
    assert HELPFUL.rstrip(".") in shown.out and NOT_KEPT not in shown.out
    card = load_artefact(folder).card
    assert card.created and not any(NOT_KEPT in limit for limit in card.limits)
    assert here(capsys, "advise", folder).out.startswith("kept: ")
    assert result.outcome.is_kept


def test_after_a_candidate_that_was_not_kept_each_verb_says_so_and_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, World(lesson=HARMFUL))
    folder = str(tmp_path / "run")
    shown = here(capsys, "library", "show", folder)
    assert shown.code == 0 and shown.out.startswith(f"{NOT_KEPT}: ")
    version = shown.out.partition("candidates: ")[2].split(",")[0].split("\n")[0]
    candidate = here(capsys, "library", "show", version)
    assert candidate.code == 0 and candidate.out.startswith(f"{NOT_KEPT}: ")
    assert HARMFUL.rstrip(".") in candidate.out
    out = here(capsys, "library", "export", version, str(tmp_path / "out"))
    assert out.code == 0 and NOT_KEPT in out.err
    card = load_artefact(tmp_path / "out").card
    assert card.limits[0].startswith(NOT_KEPT) and card.created
    for words in (["advise", folder], ["report", folder], ["runs", "list", str(tmp_path)]):
        assert here(capsys, *words).code == 0, words
    config = config_of(tmp_path, World())
    compared = here(capsys, "eval", str(config), folder)
    assert compared.code == 1 and "holds the empty library" in compared.out
    assert f"tfgrpo advise {folder}" in compared.out
    row = json.loads(here(capsys, "eval", str(config), folder, "--json").out)
    assert row["verdict"] is None and NOT_KEPT in row["notes"][0]


def test_after_a_run_that_proposed_nothing_the_word_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path, World(base=1.0))
    assert result.outcome.state == "nothing proposed"
    shown = here(capsys, "library", "show", str(tmp_path / "run"))
    assert shown.code == 0 and shown.out.startswith("nothing proposed: ")


def test_a_run_that_was_killed_names_the_command_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(lesson=HELPFUL, fail_at=20)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "close", Journal.abandon)
        with pytest.raises((Killed, BaseExceptionGroup)):
            run(tmp_path, world)
    folder = str(tmp_path / "run")
    shown = here(capsys, "library", "show", folder)
    assert shown.code == 0 and shown.out.startswith("not ended\n")
    assert "tfgrpo learn CONFIG.toml goes on" in shown.out
    assert here(capsys, "advise", folder).code == 0
    config = config_of(tmp_path, World())
    compared = here(capsys, "eval", str(config), folder)
    assert compared.code == 2 and "the same `tfgrpo learn` goes on" in compared.err


def test_what_a_person_bans_is_gone_from_report_rerun_and_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(lesson=HELPFUL)
    run(tmp_path, world)
    folder = tmp_path / "run"
    assert here(capsys, "library", "ban", str(folder), "E1").code == 0
    again = here(capsys, "library", "ban", str(folder), "E1")
    assert "no difference" in again.out
    report = json.loads(here(capsys, "report", str(folder), "--format", "json").out)
    assert [e["status"] for e in report["library"]["entries"]] == ["banned"]
    run(tmp_path, world)  # the same run again writes its artefact again
    assert not load_artefact(folder).library.shown
    assert here(capsys, "library", "undo", str(folder)).code == 0
    assert load_artefact(folder).library.shown


def test_eval_leaves_out_what_taught_the_library_unless_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path)
    config = str(folder / "config.toml")
    learnt = here(capsys, "learn", config, "--quiet", "--json", "--set", "gate.enabled=false")
    taught = {
        t
        for e in json.loads(learnt.out)["entries"]
        for t in (e.get("provenance") or {}).get("task_ids", ())
    }
    assert taught
    common = ("eval", config, str(folder / "run"), "--json", "--group-size", "2")
    row = json.loads(here(capsys, *common).out)
    assert len(row["empty"]) == 18 - len(taught) and not taught & row["empty"].keys()
    assert "left out" in row["notes"][0]
    every = json.loads(here(capsys, *common, "--split", "all").out)
    assert len(every["empty"]) == 18 and "memorised" in every["notes"][0]
    tested = json.loads(here(capsys, *common, "--split", "test").out)
    assert len(tested["empty"]) == 6 and not tested["notes"]


def test_a_second_eval_with_other_tasks_can_fork_or_take_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path)
    config = str(folder / "config.toml")
    here(capsys, "learn", config, "--quiet", "--set", "gate.enabled=false")
    common = ("eval", config, str(folder / "run"), "--group-size", "2")
    assert here(capsys, *common).code in (0, 1, 5)
    rows = (folder / "tasks.jsonl").read_text().splitlines()
    (folder / "tasks.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    refused = here(capsys, *common)
    assert refused.code == 2 and "--fork" in refused.err
    assert here(capsys, *common, "--fork").code in (0, 1, 5)
    other = tmp_path / "other"
    assert here(capsys, *common, "--folder", str(other)).code in (0, 1, 5)
    assert (other / "run.db").is_file()


def test_a_stopped_run_remembers_its_config(tmp_path: Path) -> None:
    from tfgrpo.runtime.import_string import note_config, noted_config, noted_module_folder

    (tmp_path / "run").mkdir()
    assert noted_config(tmp_path / "run") == "CONFIG.toml"
    note_config(tmp_path / "run", tmp_path / "mine" / "config.toml")
    assert noted_config(tmp_path / "run") == str(tmp_path / "mine" / "config.toml")
    assert noted_module_folder(tmp_path / "run") == (tmp_path / "mine").resolve()


def test_a_servers_error_is_its_own_sentence_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_secrets()  # another test's made-up key may be a part of the sentence
    said = "Incorrect API key provided. You can find yours in the settings."
    with FaultServer(status(401, {"error": {"message": said, "type": "invalid"}})) as server:
        folder = folder_with(tmp_path, f'[policy]\nlm = "{server.spec("m")}"')
        ran = here(capsys, "learn", str(folder / "config.toml"), "--quiet")
    assert ran.code == 3 and ran.err.count(said) == 1
    assert '{"error"' not in ran.err and "\\" not in ran.err


def test_a_folder_as_config_and_a_server_that_is_not_there_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = here(capsys, "learn", str(tmp_path))
    assert folder.code == 2 and "give the path of a TOML file" in folder.err
    away = here(capsys, "models", "--check", "http://127.0.0.1:9/v1#m")
    assert away.code == 5 and "no answer could be had" in away.err
    assert "inconclusive" not in away.err and "the same command goes on" in away.err
