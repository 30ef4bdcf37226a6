"""All runs as one site, training's page, and how far a run says it is."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report import pages_made as made
from tests.report.made import made_run
from tests.report.test_live import ask, path_of
from tfgrpo.diagnosis.progress import ProgressFile, read_progress
from tfgrpo.report.served import LiveServer, serve_all, serve_live
from tfgrpo.report.served.all_runs import find_all, render_list
from tfgrpo.report.served.training import load_training, remarks, render_training
from tfgrpo.sampling import Progress


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("all") / "runs"
    made.record(made_run(tests=3, practice=2), folder / "learnt")
    made.training(folder / "train")
    made.escalation(folder / "learnt" / "escalate")
    (folder / "errand.html").write_text(made.tree(), encoding="utf-8")
    (folder / "routing.html").write_text(made.routing(), encoding="utf-8")
    (folder / "mine.html").write_text("<html>of the user's own</html>", encoding="utf-8")
    return folder


@pytest.fixture
def server(root: Path) -> Iterator[LiveServer]:
    with serve_all(root) as running:
        yield running


def test_everything_with_a_page_is_found_and_nothing_else(root: Path) -> None:
    assert [(f.kind, f.name) for f in find_all(root)] == [
        ("search", "errand.html"),
        ("run", "learnt"),
        ("escalation", "learnt/escalate"),
        ("routing", "routing.html"),
        ("training", "train"),
    ]


def test_the_list_says_what_came_of_each(root: Path) -> None:
    page = render_list(root, find_all(root))
    assert 'href="run/learnt/"' in page and 'href="escalation/learnt%2Fescalate/"' in page
    assert "31 steps, mean reward" in page and "distilled is kept" in page
    assert ">kept</span>" in page
    assert "Nothing is here yet" in render_list(root / "nowhere", find_all(root / "nowhere"))


@pytest.mark.real
def test_each_page_is_served_and_no_other_file(server: LiveServer) -> None:
    top = path_of(server)
    for name, words in (
        ("", "Learning and evaluation"),
        ("run/learnt/", "learnt · tfgrpo report"),
        ("training/train/", "Held-out reward +0.310 by training, beyond noise"),
        ("escalation/learnt%2Fescalate/", "distilled is kept"),
        ("search/errand.html/", "search tree"),
        ("routing/routing.html/", "Routing with 64 labels a model"),
    ):
        status, _, body = ask(server, top + name)
        assert status == 200 and words in body, name
    assert "version" in json.loads(ask(server, top + "training/train/status")[2])
    assert json.loads(ask(server, top + "run/learnt/status")[2])["progress"] is None
    for name in ("search/mine.html/", "run/..%2Flearnt/", "run/train/", "training/learnt/run.db"):
        assert ask(server, top + name)[0] == 404, name


@pytest.mark.real
def test_a_reader_who_goes_away_is_no_error(
    root: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with serve_live(root / "learnt") as server, caplog.at_level(logging.ERROR):
        hasty = socket.create_connection(("127.0.0.1", server.port))
        request = f"GET {path_of(server)} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
        hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        hasty.sendall(request.encode())
        hasty.close()
        assert ask(server, path_of(server))[0] == 200
    assert "Traceback" not in capfd.readouterr().err and caplog.records == []


def test_a_training_page_has_curves_scores_time_left_and_replies(root: Path) -> None:
    view = load_training(root / "train")
    page = render_training(view)
    assert len(view.steps) == 31 and view.total == 40
    assert "31 of 40" in page and "4 min 39 s" in page  # nine steps of 31 s
    assert "before training" in page and "0.220" in page and "0.530" in page
    assert page.count("<svg") == 7
    assert page.index("msg-031") < page.index("msg-030")


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.5}\n{"step": 2, "rew')
    view = load_training(tmp_path)
    assert [row["step"] for row in view.steps] == [1]
    assert "Training" in render_training(view)
    assert "No step has ended yet." in render_training(load_training(tmp_path / "nowhere"))


def test_steps_that_teach_nothing_are_told_after_three() -> None:
    alike = {"informative_share": 0.0, "truncated_share": 0.0}
    assert remarks([alike, alike]) == []
    assert "for 3 steps" in remarks([{"informative_share": 1.0}, alike, alike, alike])[0]
    assert remarks([alike, alike, {"informative_share": 0.5}]) == []
    assert "raise rollout.max_tokens" in remarks([{"truncated_share": 1.0}])[0]


def test_a_run_says_stage_pace_and_end(tmp_path: Path) -> None:
    now = [100.0]
    file = ProgressFile(tmp_path, lambda: now[0])
    assert read_progress(tmp_path) is None
    file.update(Progress("practice", 0, 40, 0, 8), "")
    now[0] += 10
    file.update(Progress("practice", 20, 40, 1, 8), "20 calls")
    told = read_progress(tmp_path, lambda: now[0])
    assert told is not None and not told["ended"] and not told["is_quiet"]
    assert told["stages"] == [
        {"stage": "practice", "done": 20, "total": 40, "failed": 1, "in_flight": 8, "rate": 2.0}
    ]
    assert told["spent"] == "20 calls"
    file.update(Progress("gate", 0, 8, 0, 8), "")  # within a second: not written yet
    silent = read_progress(tmp_path, lambda: now[0] + 61)
    assert silent is not None and silent["is_quiet"] and len(silent["stages"]) == 1
    file.end()
    done = read_progress(tmp_path)
    assert done is not None and done["ended"] and len(done["stages"]) == 2


def test_a_full_disk_ends_the_file_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = ProgressFile(tmp_path / "gone")
    for done in (1, 2):
        file.update(Progress("gate", done, 2, 0, 0), "")
    file.end()
    assert len([r for r in caplog.records if "progress is not shown" in r.message]) == 1
