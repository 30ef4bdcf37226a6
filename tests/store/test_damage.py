"""Flipped bits, cut files and killed writers: found, told, and nothing lost that can be read."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.faults.journal_damage import Snapped, copied, said
from tests.learning.worlds import HELPFUL, World
from tests.learning.worlds import settings as run_settings
from tests.patience import PATIENCE_S
from tfgrpo import Config, FunctionPolicy, Task, learn
from tfgrpo.errors import StoreError
from tfgrpo.serve.tables import NOTE, REQUEST, add_tables
from tfgrpo.store import Journal
from tfgrpo.store.codec import pack
from tfgrpo.store.disk.files import connect
from tfgrpo.store.disk.log_frames import (
    FRAME_HEADER_BYTES,
    HEADER_BYTES,
    Header,
    log_of,
    read_log,
)
from tfgrpo.store.disk.mending import look_over
from tfgrpo.store.disk.page_sums import PageSums, sums_of
from tfgrpo.store.disk.salvage import Pages, rows_of, tables_of
from tfgrpo.store.rows import SCHEMA, Statement


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    root = tmp_path_factory.mktemp("closed")
    World(lesson=HELPFUL).learn(run_settings(root))
    return root / "run"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a killed process leaves: a file, a log with all that is new, an owner in the lock."""
    root = tmp_path_factory.mktemp("killed")
    world = Snapped(200, lambda: shutil.copytree(root / "run", root / "left"))
    world.learn(run_settings(root))
    return root / "left"


@pytest.fixture
def run(closed: Path) -> Iterator[Path]:
    """A copy of the finished run."""
    with copied(closed) as folder:
        yield folder


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file."""
    with open(file, "r+b") as opened:
        opened.seek(bit // 8)
        byte = opened.read(1)[0]
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


def everything(folder: Path, *, readonly: bool = True) -> tuple[dict[str, str], list[str]]:
    """Return all that a journal says, and what it says of damage."""
    with Journal.open(folder, readonly=readonly) as journal:
        return said(journal), journal.damaged


@pytest.mark.parametrize("state", ["closed", "killed"])
def test_a_flipped_bit_is_found_wherever_it_is_and_put_right(
    state: str, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(state)
    with copied(source) as folder:
        wanted = everything(folder)[0]
    rng = random.Random(state)
    names = ["run.db", "run.db-wal"] if state == "killed" else ["run.db"]
    for name in names:
        for _ in range(8):
            with copied(source) as folder:
                bit = rng.randrange(8 * (folder / name).stat().st_size)
                if name == "run.db-wal" and _bit_of_word(bit) >= _AMBIGUOUS:
                    bit -= 16  # the next test's
                flip(folder / name, bit)
                seen, told = everything(folder)
                assert seen == wanted, f"{name} bit {bit}"
                opened, told_again = everything(folder, readonly=False)
                assert opened == wanted, f"{name} bit {bit}"
                # A page that the log holds, too, is of no use to anybody.
                assert bool(told) == bool(told_again) == (folder / "run.db.damaged1").exists()
                assert told or (name == "run.db" and state == "killed"), f"{name} bit {bit}"
                assert everything(folder, readonly=False) == (opened, told_again)


_AMBIGUOUS = 23
"""From this bit of a word on, the checksum of SQLite's log may not tell which word was changed."""


def _bit_of_word(bit: int) -> int:
    return bit // 8 % 4 * 8 + bit % 8


def test_a_flipped_bit_of_the_log_that_cannot_be_found_is_told_and_costs_one_page(
    killed: Path,
) -> None:
    with copied(killed) as folder:
        wanted = everything(folder)[0]
    rng, lost = random.Random("high bits"), 0
    for _ in range(16):
        with copied(killed) as folder:
            log = folder / "run.db-wal"
            word = rng.randrange(32 // 4, log.stat().st_size // 4)
            flip(log, 32 * word + rng.randrange(_AMBIGUOUS, 32))
            seen, told = everything(folder, readonly=False)
            assert told and (folder / "run.db.damaged1").exists()
            if seen != wanted:
                lost += 1
                assert "what stood in 1 pages is lost" in " ".join(told)
                same = sum(wanted.get(name) == text for name, text in seen.items())
                assert same > 0.7 * len(wanted)
    assert lost < 8


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("byte", [1, 4, 6, 7, 9, 14, 18, 22, 4116])
def test_a_flipped_bit_in_the_header_of_a_frame_or_the_last_word_of_its_page_loses_nothing(
    killed: Path, share: float, byte: int
) -> None:
    with copied(killed) as folder:
        wanted = everything(folder)[0]
        raw = (folder / "run.db-wal").read_bytes()
    step = FRAME_HEADER_BYTES + 4096
    frames = (len(raw) - HEADER_BYTES) // step
    assert frames > 50
    # Of the last frame a turned bit of the second checksum may as well be one of its page.
    frame = round(share * (frames - 1)) - (byte in (22, 4116) and share == 1.0)
    for readonly in (True, False):
        with copied(killed) as folder:
            flip(folder / "run.db-wal", 8 * (HEADER_BYTES + frame * step + byte) + 3)
            seen, told = everything(folder, readonly=readonly)
            assert seen == wanted
            assert "pages of its log" in " ".join(told)


def notes(count: int, name: str = "note") -> list[Statement]:
    """Return rows of decisions."""
    sql = "INSERT INTO decisions (kind, key, at, body, digest) VALUES (?, ?, ?, ?, ?)"
    return [(sql, ("note", f"{name} {i}", 0.0, *pack({"number": i}))) for i in range(count)]


def test_a_bit_that_turns_in_the_log_of_a_living_writer_is_told_and_put_right(
    tmp_path: Path,
) -> None:
    def counted(journal: Journal) -> list[tuple[object, ...]]:
        return journal.writer.read("SELECT stage, model, n FROM hits ORDER BY n")  # no digests

    rows = [("practice", "model", 64 + i) for i in range(3)]
    with Journal.open(tmp_path / "run", create=True) as writer:
        writer.writer.commit_now([("INSERT INTO hits VALUES (?, ?, ?)", row) for row in rows])
        log = tmp_path / "run" / "run.db-wal"
        # The last row ends with its page, whose last word looks like a bit of the checksum.
        place = log.read_bytes().rpartition(b"practicemodel")[0].rindex(b"practicemodel")
        flip(log, 8 * (place + len("practicemodel")) + 1)
        with Journal.open(tmp_path / "run", readonly=True) as reader:
            assert "pages of its log" in " ".join(reader.damaged)
            assert counted(reader) == rows
        writer.writer.commit_now(notes(1))
    for readonly in (True, False):
        with Journal.open(tmp_path / "run", readonly=readonly) as journal:
            assert "every flipped bit was found" in " ".join(journal.damaged)
            assert counted(journal) == rows
            assert len(journal.decisions("note")) == 1


@pytest.mark.parametrize("flipped", [False, True])
def test_what_was_never_committed_is_no_part_of_a_journal(tmp_path: Path, flipped: bool) -> None:
    frame = FRAME_HEADER_BYTES + 4096
    with Journal.open(tmp_path / "run", create=True) as journal:
        journal.writer.commit_now(notes(20))
        committed = (tmp_path / "run" / "run.db-wal").stat().st_size
        journal.writer.commit_now(notes(400, "lost"))
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    log = tmp_path / "killed" / "run.db-wal"
    assert log.stat().st_size > committed + 8 * frame
    os.truncate(log, log.stat().st_size - 2 * frame)  # killed while it wrote the second one
    if flipped:
        flip(log, 8 * (HEADER_BYTES + FRAME_HEADER_BYTES + 2000) + 3)
        wanted = 20
    else:
        with Journal.open(tmp_path / "killed") as journal:
            assert journal.damaged == []
            journal.writer.commit_now(notes(1, "later"))  # over the head of what is left of it
            shutil.copytree(tmp_path / "killed", tmp_path / "again")
        log = tmp_path / "again" / "run.db-wal"
        wanted = 21
    for readonly in (True, False):
        with Journal.open(log.parent, readonly=readonly) as journal:
            assert bool(journal.damaged) == flipped
            found = [key for key, _ in journal.decisions("note")]
            assert len(found) == wanted
            assert not any(key.startswith("lost") for key in found)


@pytest.mark.parametrize("at", [8 * 20 + 1, 8 * 26 + 3, 8 * 100 + 5])
def test_a_flipped_bit_in_the_head_of_the_first_page_or_its_tables_locks_nothing(
    run: Path, at: int
) -> None:
    wanted = everything(run)[0]
    flip(run / "run.db", at)
    assert everything(run, readonly=False)[0] == wanted
    assert everything(run)[0] == wanted


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.97])
def test_a_cut_file_opens_with_what_is_left_and_the_run_goes_on(
    run: Path, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = everything(run)[0]
    with open(run / "run.db", "r+b") as opened:
        opened.truncate(int(share * (run / "run.db").stat().st_size))
    caplog.clear()
    found, told = everything(run)
    assert told and "a lost reply is asked, and paid for, again" in caplog.text
    groups = {name for name in found if name.startswith(("group", "decision", "library"))}
    assert all(found[name] == wanted[name] for name in groups)
    assert share < 0.9 or len(groups) > 10
    world = World(lesson=HELPFUL)
    world.learn(run_settings(run.parent))
    assert world.calls < 244 or share < 0.2, "what is left is not paid again"
    assert rewards(everything(run)[0]) == rewards(wanted)


def rewards(items: dict[str, str]) -> dict[str, list[float]]:
    """Return the rewards of the groups among what a journal said."""
    groups = {name: json.loads(row) for name, row in items.items() if name.startswith("group ")}
    return {n: [r["score"]["reward"] for r in row["rollouts"]] for n, row in groups.items()}


def test_many_flipped_bits_in_one_page_cost_that_page(run: Path) -> None:
    wanted = everything(run)[0]
    with connect(run / "run.db", readonly=True) as connection:
        pages = connection.execute("SELECT count(*) FROM rollouts").fetchone()[0]
    assert pages > 100
    raw = bytearray((run / "run.db").read_bytes())
    at = next(
        p for p in range(0, len(raw), 4096)
        if raw[p] == 0x0D and raw[p : p + 4096].count(b'"rollout_id"') > 3
    )  # fmt: skip
    raw[at + 2000 : at + 2100] = bytes(100)
    (run / "run.db").write_bytes(raw)
    found, told = everything(run)
    assert "what stood in 1 pages is lost" in told[0] and "rollouts among it" in told[0]
    groups = [name for name in found if name.startswith("group ")]
    assert all(found[name] == wanted[name] for name in groups)
    assert len(groups) >= len([n for n in wanted if n.startswith("group ")]) - 8


def test_a_page_of_replies_that_is_damaged_keeps_the_replies_that_prove_themselves(
    run: Path,
) -> None:
    with Journal.open(run, readonly=True) as journal:
        keys = [key for (key,) in journal._writer.read("SELECT key FROM completions")]
        texts = {key: journal.calls.find_reply(key) for key in keys}
    raw = bytearray((run / "run.db").read_bytes())
    at = next(
        p for p in range(0, len(raw), 4096)
        if raw[p] == 0x0D and raw[p : p + 4096].count(b'"finish"') > 3
    )  # fmt: skip
    inside = raw.index(b'"finish"', at)
    raw[inside + 2 : inside + 5] = b"xyz"
    (run / "run.db").write_bytes(raw)
    with Journal.open(run) as journal:
        found = {key: journal.calls.find_reply(key) for key in keys}
        assert "1 replies among it" in journal.damaged[0]
    missing = [key for key in keys if found[key] is None]
    assert len(missing) == 1
    assert all(found[key] == texts[key] for key in keys if key not in missing)


def test_attempts_of_a_function_leave_no_replies_that_could_be_lost(tmp_path: Path) -> None:
    config = Config.from_mapping({
        "run": {"folder": str(tmp_path / "run")}, "policy": {"lm": "scripted:echo"},
        "learn": {"batch": 6, "group_size": 4, "entries": "exemplars"},
    })  # fmt: skip
    policy = FunctionPolicy(lambda prompt, context: "no", policy_id="no")
    learn(config, tasks=[Task(f"t{i}", f"say {i}", str(i)) for i in range(18)], policy=policy)
    with open(tmp_path / "run" / "run.db", "r+b") as opened:
        opened.write(bytes(100))
    with Journal.open(tmp_path / "run", readonly=True) as journal:
        assert "1 pages is lost; a lost reply" in journal.damaged[0]


def test_a_result_whose_call_is_lost_still_counts_as_spent(run: Path) -> None:
    with Journal.open(run, readonly=True) as journal:
        before = sum(row.usage.total_tokens for row in journal.spend())
        first = journal._writer.read("SELECT key FROM calls WHERE call = 1")[0][0]
    raw = bytearray((run / "run.db").read_bytes())
    calls = [
        p for p in range(0, len(raw), 4096)
        if raw[p] == 0x0D and first in raw[p : p + 4096] and b"gate" in raw[p : p + 4096]
    ]  # fmt: skip
    at = calls[0]
    raw[at + 3000 : at + 3050] = bytes(50)
    (run / "run.db").write_bytes(raw)
    with Journal.open(run) as journal:
        assert "calls among it" in journal.damaged[0]
        assert sum(row.usage.total_tokens for row in journal.spend()) == before


def test_a_damaged_journal_beside_a_living_writer_can_be_read(run: Path) -> None:
    wanted = everything(run)[0]
    with Journal.open(run) as journal:
        journal.record_decision("note", {"a": 1})
        flip(run / "run.db", 8 * (run / "run.db").stat().st_size - 9_999)
        found, told = everything(run)
        assert told
        wrong = [n for n in wanted if n != "state" and found.get(n) != wanted[n]]
        assert not wrong
        assert not (run / "run.db.damaged1").exists(), "who only looks changes nothing"


def test_damaged_checksums_are_made_anew_and_nothing_is_taken_for_damaged(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = everything(run)[0]
    flip(sums_of(run / "run.db"), 500)
    assert everything(run, readonly=False) == (wanted, [])
    assert "it is made anew" in caplog.text
    assert look_over(run / "run.db", is_alone=True).why == ""


def test_a_journal_of_before_there_were_checksums_opens_and_gets_them(run: Path) -> None:
    wanted = everything(run)[0]
    sums_of(run / "run.db").unlink()
    assert everything(run) == (wanted, [])
    assert everything(run, readonly=False) == (wanted, [])
    found = PageSums.read(run / "run.db")
    assert found is not None and len(found.sums) * 4096 == (run / "run.db").stat().st_size


def test_a_journal_that_another_program_wrote_is_taken_as_it_is_and_told(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(sqlite3.connect(run / "run.db")) as connection, connection:
        connection.executemany(
            "INSERT INTO hits VALUES (?, 'm', 1)", [("s" * 900,) for _ in range(40)]
        )
    found, told = everything(run, readonly=False)
    assert told == [] and "was written by another program" in caplog.text
    assert sum("spend " + "s" * 900 in name for name in found) == 1
    caplog.clear()
    everything(run, readonly=False)
    assert "another program" not in caplog.text


_WRITER = """
import sys
from tfgrpo.serve.tables import NOTE, REQUEST, add_tables
from tfgrpo.store import Journal
from tfgrpo.store.codec import pack
from tfgrpo.store.disk import database
database.CHECKPOINT_EVERY = int(sys.argv[2])
database.LOG_BYTES, database.MOST_LOG_BYTES = 200_000, 400_000
journal = Journal.open(sys.argv[1], create=True)
for i in range(int(sys.argv[3])):
    journal.record_decision("n", {"i": i, "text": "x" * 900}, key=str(i))
    print(i, flush=True)
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_a_journal_that_is_not_taken_for_damaged(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    args = [sys.executable, "-c", _WRITER, str(folder), "40", "100000"]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    rng = random.Random(3)
    try:
        for number in range(12):
            for _ in range(rng.randint(40, 300)):
                kept = int(process.stdout.readline())
            process.send_signal(signal.SIGSTOP)
            _until_stopped(process.pid)
            copy = tmp_path / f"copy{number}"
            shutil.copytree(folder, copy)
            process.send_signal(signal.SIGCONT)
            assert look_over(copy / "run.db", is_alone=True).why == ""
            with Journal.open(copy) as journal:
                assert journal.damaged == []
                assert len(journal.decisions("n")) >= kept + 1
            assert look_over(copy / "run.db", is_alone=True).why == ""
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        process.stdout.close()


def _until_stopped(pid: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
        if state in "Tt":
            return
        time.sleep(0.001)
    raise AssertionError("the process does not stop")


def test_a_copy_of_the_process_writes_no_checksums(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "run", create=True) as journal:
        journal.record_decision("note", 1)
        sums = sums_of(tmp_path / "run" / "run.db")
        before = sums.read_bytes()
        child = os.fork()
        if child == 0:
            journal.writer._seal()
            os._exit(0)
        os.waitpid(child, 0)
        assert sums.read_bytes() == before
        journal.writer._seal()
        assert sums.read_bytes() != before


_TRY_LOCK = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002)
except OSError:
    print("locked")
else:
    print("free")
"""
"""Asks for the bytes that SQLite locks in a database that is open somewhere."""


def test_looking_at_a_journal_leaves_the_locks_of_a_writer_in_the_same_process(run: Path) -> None:
    def state() -> str:
        args = [sys.executable, "-c", _TRY_LOCK, str(run / "run.db")]
        return subprocess.run(args, capture_output=True, text=True, check=True).stdout.strip()

    with Journal.open(run) as journal:
        journal.record_decision("note", 1)
        assert state() == "locked"
        everything(run)
        handles = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            everything(run)
        assert state() == "locked"
        assert len(os.listdir("/proc/self/fd")) == handles
    assert state() == "free"


def test_a_journal_that_nobody_closes_is_not_taken_for_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    subprocess.run(
        [sys.executable, "-c", _WRITER, str(folder), "40", "200"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert look_over(folder / "run.db", is_alone=True).why == ""
    with Journal.open(folder) as journal:
        assert journal.damaged == [] and len(journal.decisions("n")) == 200


def test_a_damaged_frame_of_the_log_costs_its_page_and_no_later_commit(tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    with Journal.open(folder, create=True) as journal:
        for i in range(60):
            journal.record_decision("n", {"i": i, "text": "x" * 900}, key=str(i))
        shutil.copytree(folder, copy)
    log = log_of(copy / "run.db")
    raw = bytearray(log.read_bytes())
    frames = (len(raw) - 32) // 4120
    at = 32 + (frames // 2) * 4120 + 24
    raw[at + 1000 : at + 1400] = b"\xaa" * 400
    log.write_bytes(raw)
    assert read_log(copy / "run.db").lost == 1
    with Journal.open(copy) as journal:
        kept = [payload["i"] for _, payload in journal.decisions("n")]
        assert "1 pages of its log" in journal.damaged[0]
    assert 59 in kept and len(kept) >= 55 and kept == sorted(kept)


def test_a_log_that_is_cut_or_missing_is_told(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with copied(killed) as folder:
        everything(folder)
        assert caplog.text == ""
        with open(folder / "run.db-wal", "r+b") as opened:
            opened.truncate(123_456)
        seen, told = everything(folder)
        assert "run.db-wal ends within a write" in caplog.text and told == []
        assert everything(folder, readonly=False)[0] == seen
    with copied(killed) as folder:
        (folder / "run.db-wal").unlink()
        caplog.clear()
        everything(folder)
        assert "the newest rows are lost" in caplog.text
        caplog.clear()
        everything(folder, readonly=False)
        assert "the newest rows are lost" in caplog.text
    for left in (0, 1, HEADER_BYTES):
        with copied(killed) as folder:
            os.truncate(folder / "run.db-wal", left)
            caplog.clear()
            everything(folder, readonly=False)
            assert "the newest rows are lost" in caplog.text


def test_a_run_folder_on_a_full_disk_keeps_its_damaged_journal(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(run / "run.db", 80_000)
    before = (run / "run.db").read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", full)
        patched.setattr(shutil, "copyfile", full)
        with pytest.raises(StoreError, match="disk is full"):
            Journal.open(run)
    assert (run / "run.db").read_bytes() == before
    everything(run, readonly=False)


def test_a_gateways_tables_are_read_out_of_a_file_without_its_first_page(run: Path) -> None:
    with Journal.open(run) as journal:
        add_tables(journal)
        names = [(f"r{i:04}",) for i in range(300)]
        rest = (0.5, "e", "route", *"abcdefgh", 0.25, None, *"lcmd", b"p" * 50)
        journal.writer.commit_now([(REQUEST, (name, *rest)) for (name,) in names])
        journal.writer.commit_now([(NOTE, (1.5, "kind", name, "body")) for (name,) in names])
    raw = bytearray((run / "run.db").read_bytes())
    raw[:4096] = os.urandom(4096)
    (run / "run.db").write_bytes(raw)
    with Journal.open(run) as journal:
        read = journal.writer.read
        assert read("SELECT response_id FROM requests ORDER BY 1") == names
        assert read("SELECT name FROM notes ORDER BY note") == names
        assert read("SELECT DISTINCT at, share, prompt FROM requests") == [(0.5, 0.25, b"p" * 50)]
        assert read("PRAGMA user_version") == [(2,)]
        add_tables(journal)


def test_checksums_that_somebody_else_wrote_run_nothing(run: Path) -> None:
    wanted = everything(run)[0]
    found = PageSums.read(run / "run.db")
    assert found is not None
    found.schema = [f"ATTACH DATABASE '{run / 'other.db'}' AS x"]
    found._is_new = True
    found.write()
    flip(run / "run.db", 90_000)
    everything(run)
    assert not (run / "other.db").exists()
    assert set(everything(run, readonly=False)[0]) <= set(wanted)


VALUES = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=40).filter(lambda t: "\0" not in t),
    st.binary(max_size=9000),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
)


@settings(max_examples=25)
@given(rows=st.lists(st.tuples(st.integers(-(2**62), 2**62), VALUES), unique_by=lambda r: r[0],
                     max_size=60))  # fmt: skip
def test_rows_are_read_as_sqlite_reads_them(rows: list[tuple[int, Any]]) -> None:
    schema = [
        "CREATE TABLE t (t INTEGER PRIMARY KEY, v NOT NULL, w REAL)",
        "CREATE TABLE k (k INTEGER, v NOT NULL, o TEXT, PRIMARY KEY (k)) WITHOUT ROWID",
    ]
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for sql in schema:
            connection.execute(sql)
        connection.executemany("INSERT INTO t VALUES (?, ?, 0.5)", rows)
        connection.executemany("INSERT INTO k VALUES (?, ?, 'o')", rows)
        raw = connection.serialize()
    with open(os.memfd_create("file"), "r+b") as file:
        file.write(raw)
        file.flush()
        pages = Pages(file.fileno(), None, {}, {}, (), page_size=4096, count=len(raw) // 4096)
        found: dict[str, list[Any]] = {"t": [], "k": []}
        for table, some in rows_of(pages, tables_of(schema)):
            found[table.name] += some
    assert sorted(found["t"]) == sorted([n, v, 0.5] for n, v in rows)
    assert sorted(found["k"]) == sorted([n, v, "o"] for n, v in rows)


def test_every_row_of_a_run_can_be_told_from_those_of_all_other_tables(run: Path) -> None:
    statements = [s.strip() for s in SCHEMA.split(";") if s.strip()]
    tables = {table.name: table for table in tables_of(statements)}
    with connect(run / "run.db", readonly=True) as connection:
        for name, table in tables.items():
            for row in connection.execute(f"SELECT {', '.join(table.columns)} FROM {name}"):
                values = [None if i == table.number else v for i, v in enumerate(row)]
                fitting = [t.name for t in tables.values() if t.fits(values)]
                alike = [f for f in fitting if tables[f].has_rowid == table.has_rowid]
                assert alike == [name]


@pytest.mark.parametrize("is_big", [False, True])
def test_the_one_flipped_bit_of_a_frame_is_found(is_big: bool) -> None:
    rng = random.Random(5)
    head = Header(4096, b"saltsalt", (1, 2), is_big)
    data = rng.randbytes(4104)
    right = head.checksum(data, (7, 8))
    found = 0
    for _ in range(20):
        bit = rng.randrange(8 * len(data))
        turned = bytearray(data)
        turned[bit // 8] ^= 1 << bit % 8
        has = head.checksum(bytes(turned), (7, 8))
        assert has != right
        mended = head.with_each_bit_turned(bytes(turned), has, right)
        assert data in mended
        found += mended == [data]
    assert found > 10
    twice = bytes([data[0] ^ 1, data[1] ^ 2, *data[2:]])
    assert head.with_each_bit_turned(twice, head.checksum(twice, (7, 8)), right) == []
