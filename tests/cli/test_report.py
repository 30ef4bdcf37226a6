"""`tfgrpo report` and `tfgrpo advise`, through the command line's own entry point."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.made import made_run
from tfgrpo.cli.main import main
from tfgrpo.runtime.output import safe_output
from tfgrpo.store.journal import Journal


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = made_run(tests=12, practice=4)
    folder = tmp_path_factory.mktemp("runs") / "one"
    with Journal.open(folder, create=True, config=made.config) as store:
        for group in made.groups:
            store.record_group(group)
        for version, payload in made.libraries:
            store.record_library(version, payload)
        for decision in made.decisions:
            store.record_decision(decision.kind, decision.payload, decision.key)
    return str(folder)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


def test_the_report_is_one_file_in_the_run_folder(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "report", run)
    file = Path(run) / "report.html"
    assert (code, out.strip()) == (0, str(file))
    assert file.read_text().startswith("<!doctype html>")
    assert err.startswith("verdict ")
    assert list(file.parent.glob("*.part")) == []


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--min-mean", "0.1"), 0),
        (("--min-mean", "0.99"), 1),
        (("--min-share", "0.1", "--score", "0.2"), 0),
        (("--min-each", "1.0"), 1),
        (("--min-gain", "0.9"), 1),
    ],
)
def test_screen_json_and_exit_code_are_one_verdict(
    run: str, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], code: int
) -> None:
    got, out, err = call(capsys, "report", run, "--format", "json", *options)
    verdict = json.loads(out)["verdict"]
    assert (got, verdict["exit_code"], verdict["text"]) == (code, code, err.strip())


def test_a_mixture_of_rules_is_a_usage_error(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "report", run, "--min-mean", "0.5", "--min-each", "0.5")
    assert (code, out) == (2, "")
    assert "one rule" in err


def test_nothing_scored_is_inconclusive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Journal.open(tmp_path / "r", create=True).close()
    code, out, _ = call(
        capsys, "report", str(tmp_path / "r"), "--format", "junit", "--min-mean", "0"
    )
    assert code == 5
    assert "<error" in out


def test_a_folder_without_a_run_is_a_store_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "report", str(tmp_path))
    assert code == 6
    assert "there is no run" in err


def test_a_target_that_cannot_be_written_leaves_nothing(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    code, _, err = call(capsys, "report", run, "--out", str(tmp_path / "file" / "r.html"))
    assert code == 6
    assert "choose another --out" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_markdown_goes_to_standard_output(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "report", run, "--format", "md")
    assert code == 0
    assert out.startswith("# one\n") and "## What pays next" in out


def test_advice_is_printed_and_given_as_json(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "advise", run, "--json")
    rows = json.loads(out)
    assert code == 0
    assert {r["lever"] for r in rows} == {"experience", "routing", "best_of_k", "hints", "rl"}
    code, out, _ = call(capsys, "advise", run)
    assert out.startswith(f"kept: best bound\n1. {rows[0]['headline']}")


@pytest.mark.real
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8"])
@pytest.mark.parametrize("form", ["md", "json", "junit"])
def test_a_report_is_written_in_any_code_page(run: str, encoding: str, form: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tfgrpo", "report", run, "--format", form],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode(encoding).strip()


@given(st.text(st.characters(codec=None), max_size=40), st.sampled_from(["ascii", "cp1252"]))
def test_no_text_breaks_a_stream_of_any_code_page(text: str, encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    with contextlib.redirect_stdout(stream), safe_output():
        print(text)
    stream.flush()
    assert raw.getvalue()


def test_a_training_run_has_a_page_and_advice_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.report.pages_made import training

    folder = str(tmp_path / "train")
    training(tmp_path / "train")
    code, out, _ = call(capsys, "report", folder)
    assert (code, out.strip()) == (0, f"{folder}/report.html")
    page = (tmp_path / "train" / "report.html").read_text(encoding="utf-8")
    assert "Held-out reward +0.310 by training" in page
    for words in (["report", folder, "--format", "json"], ["advise", folder]):
        code, _, err = call(capsys, *words)
        assert code == 2 and "is a training run" in err


def test_view_says_which_folder_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "view", str(tmp_path / "nowhere"))
    assert code == 2 and "there is no folder" in err and "tfgrpo learn" in err


@pytest.mark.parametrize(("at_terminal", "waits"), [(True, 1), (False, 0)])
def test_the_page_of_a_run_stays_until_ctrl_c_where_somebody_can_press_it(
    at_terminal: bool,
    waits: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tfgrpo.cli.learn import _stay

    done: list[str] = []

    class Server:
        url = "http://127.0.0.1:1/token/"

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None:
            done.append("closed")

        def wait(self) -> None:
            done.append("waited")
            raise KeyboardInterrupt

    monkeypatch.setattr(sys.stderr, "isatty", lambda: at_terminal, raising=False)
    _stay(Server())  # type: ignore[arg-type]
    assert done == ["waited"] * waits + ["closed"]
    assert ("stays at http" if at_terminal else "tfgrpo view") in capsys.readouterr().err
