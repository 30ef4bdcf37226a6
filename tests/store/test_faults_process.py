"""F23 to F30, T8, T12: processes that die, disks that fill, files that are not what they should be.

Parts that need another process or user are marked `real`.
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
import os
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.store.driver import CountingServer, Result, Settings, learn, run_whole, scratch
from tests.store.test_crash_property import run_until_death
from tests.store.test_faults_text import group_of
from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.protocols import Request
from tfgrpo.rollout import Rollout
from tfgrpo.runtime.syntax import syntax_tree
from tfgrpo.store import CallCache, Ledger, read_groups, write_groups
from tfgrpo.store import export as export_module
from tfgrpo.store.disk import database as database_module
from tfgrpo.store.disk import files as files_module
from tfgrpo.store.journal import Journal
from tfgrpo.store.journaled_lm import JournaledLM
from tfgrpo.store.rows import Statement

ROOT = Path(__file__).parents[2]
ASK = Request((Message("user", "q"),))


def spawn(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)  # type: ignore[call-overload,no-any-return]


def transactions_of(given: Settings, folder: Path) -> list[int]:
    """Return how many rows each transaction of an uninterrupted run writes, in order."""
    sizes: list[int] = []
    with Journal.open(folder, create=True, config=given.to_config()) as store:
        write = store._writer._write

        def counting(batch: Sequence[Statement]) -> None:
            sizes.append(len(batch))
            write(batch)

        store._writer._write = counting  # type: ignore[method-assign]
        asyncio.run(learn(store, CountingServer(), given))
    return sizes


def kill_at_every_event(given: Settings, whole: Result, at: list[int], gets_through: bool) -> None:
    """Kill a run at each of the events `at`, resume, compare.

    Args:
        gets_through: the transaction that holds the event is in the file when the process dies.
    """
    with scratch() as name:
        for event in at:
            folder, server = Path(name) / f"e{event}", CountingServer()
            run_until_death(folder, server, given, event, gets_through)
            assert run_whole(folder, server, given) == whole, event
            assert sum(server.received.values()) - len(server.received) <= given.concurrency


@pytest.mark.parametrize("gets_through", [False, True])
def test_f23_a_kill_at_every_event_of_a_run_changes_nothing(gets_through: bool) -> None:
    given = Settings(tasks=2, group_size=2, steps=2, concurrency=3)
    with scratch() as name:
        events = sum(transactions_of(given, Path(name) / "counted"))
        whole = run_whole(Path(name) / "whole", CountingServer(), given)
    assert events > 40
    kill_at_every_event(given, whole, list(range(1, events + 1)), gets_through)


@pytest.mark.real
def test_f23_a_kill_at_every_event_of_a_run_of_300_events() -> None:
    """All events of one transaction come or go together and the run is the same each time, so a
    kill at any event of a transaction is the same kill: one stands for all of them."""
    given = Settings(tasks=7, group_size=5, steps=2, concurrency=4)
    with scratch() as name:
        sizes = transactions_of(given, Path(name) / "counted")
        assert sizes == transactions_of(given, Path(name) / "again")
        whole = run_whole(Path(name) / "whole", CountingServer(), given)
    assert sum(sizes) >= 300
    firsts = [1 + sum(sizes[:i]) for i in range(len(sizes))]
    kill_at_every_event(given, whole, firsts[0::2], gets_through=False)
    kill_at_every_event(given, whole, firsts[1::2], gets_through=True)


@pytest.mark.real
def test_f23_kill_9_over_a_socket_pays_nothing_twice() -> None:
    from tests.benchmarks.runs.kill9 import measure

    figures = measure(kills=5, rollouts=60, seed=1)
    assert (figures["kills"], figures["paid_twice"], figures["lost"]) == (5, 0, 0)
    assert figures["in_flight_resent"] <= 5 * figures["concurrency"]
    assert figures["equal"] is True


def test_f24_a_file_that_is_being_written_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    target = tmp_path / "groups.jsonl"
    old = [group_of("old")]
    write_groups(target, old)

    def breaking() -> object:
        yield group_of("new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_groups(target, breaking())  # type: ignore[arg-type]
    assert list(read_groups(target)) == old
    assert [p.name for p in tmp_path.iterdir()] == ["groups.jsonl"]


def test_f24_a_journal_that_was_being_made_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.db.part").write_bytes(b"half a file")
    with Journal.open(folder, create=True) as store:
        store.record_decision("x", 1)
    assert not (folder / "run.db.part").exists()


FULL_DISK = """
    import asyncio, resource, sys
    from tfgrpo.errors import StoreError
    from tfgrpo.lm.scripted import ScriptedLM
    from tfgrpo.messages import Message
    from tfgrpo.protocols import Request
    from tfgrpo.store import JournaledLM, Journal
    store = Journal.open(sys.argv[1])
    lm = ScriptedLM(lambda request, seed: f"{seed} " + "long " * 20000)
    journaled = JournaledLM(lm, store)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
    async def fill():
        for i in range(10_000):
            await journaled.complete(Request((Message("user", f"q{i}"),)), 1, [i])
    try:
        asyncio.run(fill())
    except StoreError as exc:
        print(exc)
    kept = len(lm.requests)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.close()  # space was freed: what was paid for is saved now
    print(kept)
"""


@pytest.mark.real
def test_f25_a_full_disk_is_one_clear_line_and_freed_space_saves_what_was_paid(
    tmp_path: Path,
) -> None:
    Journal.open(tmp_path / "run", create=True).close()
    done = spawn(FULL_DISK, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    message, asked = done.stdout.strip().splitlines()
    assert "disk is full or a size limit is reached" in message
    assert "run.db" in message and "MB" in message and "run again" in message
    with Journal.open(tmp_path / "run") as store:
        assert store._writer.read("PRAGMA integrity_check") == [("ok",)]
        rows = store.spend()
        assert store._writer.read("SELECT count(*) FROM completions")[0][0] == int(asked)
        assert rows[0].usage.calls == int(asked)


@pytest.mark.real
@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="needs to become another user")
def test_f26_a_read_only_folder_is_one_clear_line_before_any_call(tmp_path: Path) -> None:
    code = """
        import os, sys
        from tfgrpo.errors import StoreError
        from tfgrpo.store import Journal
        Journal.open(sys.argv[1] + "/old", create=True).close()
        os.chmod(sys.argv[1] + "/old", 0o555); os.chmod(sys.argv[1] + "/old/run.db", 0o444)
        os.chmod(sys.argv[1] + "/old/lock", 0o444); os.chmod(sys.argv[1], 0o555)
        import tfgrpo.store.disk.database, tfgrpo.store.fold  # loaded while still allowed
        os.setgid(65534); os.setuid(65534)
        for name in ("new", "old"):
            try:
                Journal.open(sys.argv[1] + "/" + name, create=True)
            except StoreError as exc:
                print(str(exc).count(chr(10)), exc)
        with Journal.open(sys.argv[1] + "/old", readonly=True) as store:
            print("read", store.state().rollouts)
    """
    for parent in tmp_path.parents:
        if parent.stat().st_uid == 0 and "pytest" in str(parent):
            parent.chmod(0o755)
    done = spawn(code, str(tmp_path))
    tmp_path.chmod(0o755)
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 3, done.stderr
    for line in lines[:2]:
        assert line.startswith("0 ") and "read-only for this user" in line
    assert lines[2] == "read 0"


@pytest.mark.parametrize("name", ["with space", "ünï©ode-日本", "per%cent?#&x=1", "it's"])
def test_f26_odd_paths_work(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "run"
    with Journal.open(folder, create=True) as store:
        store.record_decision("x", 1)
    with Journal.open(folder, readonly=True) as store:
        assert store.decisions("x") == [("", 1)]


@pytest.mark.real
def test_f26_a_tight_umask_and_no_home_work(tmp_path: Path) -> None:
    code = """
        import os, sys
        os.umask(0o077)
        from tfgrpo.store import Journal
        with Journal.open(sys.argv[1], create=True) as store:
            store.record_decision("x", 1)
        print(oct(os.stat(sys.argv[1] + "/run.db").st_mode & 0o777))
    """
    done = spawn(code, str(tmp_path / "run"), env={"PATH": os.environ["PATH"]})
    assert done.stdout.strip() == "0o600", done.stderr


def test_f27_a_jumping_wall_clock_changes_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, wall = [0.0], [1e9]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    with Journal.open(tmp_path / "run", create=True, budget=Ledger(clock=lambda: now[0])) as store:
        now[0] += 5
        wall[0] -= 86_400
        store.record_decision("x", 1)
    with Journal.open(tmp_path / "run", budget=Ledger(clock=lambda: now[0])) as store:
        assert store.ledger.spent["seconds"] == pytest.approx(5)


def test_f28_a_second_opener_is_told_who_has_the_run_and_harms_nothing(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "run", create=True) as store:
        with pytest.raises(StoreError, match=rf"in use by this process \(pid {os.getpid()} on"):
            Journal.open(tmp_path / "run")
        store.record_decision("x", 1)
        with Journal.open(tmp_path / "run", readonly=True) as reader:
            assert reader.decisions("x") == [("", 1)]
    Journal.open(tmp_path / "run").close()


@pytest.mark.real
def test_f28_a_second_process_is_told_and_a_dead_owner_is_followed(tmp_path: Path) -> None:
    code = """
        import sys, time
        from tfgrpo.store import Journal
        store = Journal.open(sys.argv[1], create=True)
        store.record_decision("owner", 1)
        print("open", flush=True)
        time.sleep(60)
    """
    folder = tmp_path / "run"
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert owner.stdout is not None and owner.stdout.readline() == b"open\n"
    with pytest.raises(StoreError, match=rf"process {owner.pid} \(pid {owner.pid} on host "):
        Journal.open(folder)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    with Journal.open(folder) as store:
        assert store.decisions("owner") == [("", 1)]
        assert store._lock is not None and store._lock.was_killed
        assert store.state().interruptions == 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwrite(path: Path) -> None:
    path.write_bytes(b"this is a text file, not a journal at all\n" * 100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def of_somebody_else(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE x (y)")
    connection.close()


def newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "damaged"),
        (overwrite, "damaged or not a journal"),
        (empty, "not a journal of tfgrpo"),
        (of_somebody_else, "not a journal of tfgrpo"),
        (newer, "journal version 99, this tfgrpo reads 1 and 2"),
    ],
)
def test_a_file_that_is_no_sound_journal_is_one_clear_line(
    tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    store = Journal.open(tmp_path / "run", create=True)
    for i in range(200):
        store.record_decision("x", "long " * 100 + str(i))
    store.abandon()  # killed, so that the next opening looks closely
    spoil(tmp_path / "run" / "run.db")
    if spoil in (cut, overwrite, empty):  # with its checksums what is left of it opens
        (tmp_path / "run" / "run.db-sums").unlink()
    with pytest.raises(StoreError, match=words) as caught:
        Journal.open(tmp_path / "run")
    assert "run.db" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(StoreError):  # and the lock was given back
        Journal.open(tmp_path / "run")


def test_no_run_in_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no run in"):
        Journal.open(tmp_path)
    with pytest.raises(StoreError, match="there is no run in"):
        Journal.open(tmp_path, readonly=True)
    assert list(tmp_path.iterdir()) == []


async def test_a_damaged_value_is_a_miss_told_and_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Journal.open(folder, create=True) as store:
        await JournaledLM(ScriptedLM("first"), store).complete(ASK, 1, [1])
        store.record_group(group_of("a", group_id="g1"))
        store.record_group(group_of("b", group_id="g2"))
        store.record_library("v1", ["x"])
    connection = sqlite3.connect(folder / "run.db")
    for table in ("completions", "libraries"):
        connection.execute(f"UPDATE {table} SET body = replace(body, 'x', 'y')")
        connection.execute(f"UPDATE {table} SET body = replace(body, 'first', 'fIrst')")
    connection.execute("UPDATE rollouts SET body = replace(body, '0.5', '1.5') WHERE rollout = 1")
    connection.commit()
    connection.close()
    with Journal.open(folder) as store:
        again = ScriptedLM("second")
        assert (await JournaledLM(again, store).complete(ASK, 1, [1]))[0].text == "second"
        assert [g.group_id for g in store.groups()] == ["g2"]
        assert store.libraries() == []
        assert len(store.damaged) == 4
    with Journal.open(folder) as store:  # remembered, and not told again
        assert (await JournaledLM(again, store).complete(ASK, 1, [1]))[0].text == "second"
        assert len(again.requests) == 1
        assert store.damaged == []


def test_a_network_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/x / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    real = files_module.Path
    monkeypatch.setattr(files_module, "Path", lambda p: mounts if p == "/proc/mounts" else real(p))
    with pytest.raises(StoreError, match=r"network disk .nfs4 at"):
        Journal.open(tmp_path / "run", create=True)


def test_rows_that_nobody_waits_for_are_in_the_file_soon(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "run", create=True) as store:
        store._writer.put([("INSERT INTO hits VALUES ('s', 'm', 1)", ())])
        deadline = time.monotonic() + 5
        while store._writer._queue and time.monotonic() < deadline:
            time.sleep(0.002)
        assert store.spend()[0].hits == 1


def test_the_log_is_moved_into_the_file_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "CHECKPOINT_EVERY", 50)
    with Journal.open(tmp_path / "run", create=True) as store:
        before = (tmp_path / "run" / "run.db").stat().st_size
        for i in range(300):
            store.record_decision("x", f"{i} " + "long " * 200)
        deadline = time.monotonic() + 5
        while (tmp_path / "run" / "run.db").stat().st_size == before:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_one_store_serves_several_threads(tmp_path: Path) -> None:
    import threading

    with Journal.open(tmp_path / "run", create=True) as store:

        def work(n: int) -> None:
            for i in range(20):
                rollout = Rollout(f"r{n}-{i}", "t").failed("refused", "x")
                store.record_rollout(rollout, group_id="g", verifier_id="v")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.state().rollouts == 80


def test_t8_nothing_here_reads_or_evaluates_code_from_files() -> None:
    banned = {"pickle", "marshal", "shelve", "dill", "joblib", "yaml"}
    calls = {"eval", "exec", "__import__"}
    for path in (ROOT / "tfgrpo" / "store").glob("*.py"):
        for node in ast.walk(syntax_tree(path.read_text())):
            if isinstance(node, ast.Import):
                assert not banned & {a.name.split(".")[0] for a in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in banned, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in calls, path


def test_t12_a_bomb_a_long_line_and_a_bad_row_are_refused_with_their_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = json.dumps(group_of("x").to_dict())
    bad = tmp_path / "bad.jsonl"
    for row, words in (
        ("{not json", "line 3: not a rollout group"),
        ('{"group_id": 1}', "line 3: not a rollout group .KeyError"),
        ("[1, 2]", "line 3: not a rollout group"),
        ("[" * 100_000, "line 3: not a rollout group .RecursionError"),
    ):
        bad.write_text(f"{good}\n\n{row}\n")
        with pytest.raises(ConfigError, match=words):
            list(read_groups(bad))
    monkeypatch.setattr(export_module, "MAX_LINE_BYTES", 10_000)
    bad.write_text(good + "\n" + "x" * 20_000)
    with pytest.raises(ConfigError, match="line 2: longer than 10000 bytes"):
        list(read_groups(bad))
    monkeypatch.setattr(export_module, "_unpacked_limit", lambda source, kind: 50_000)
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress(b"\n" * 10_000_000))
    with pytest.raises(ConfigError, match=r"bomb\.jsonl\.gz, line \d+: unpacks to more than"):
        list(read_groups(bomb))
    cut(bomb)
    with pytest.raises(ConfigError, match=r"cannot be read|unpacks"):
        list(read_groups(bomb))


def test_t12_ids_never_become_file_names(tmp_path: Path) -> None:
    wicked = "../../escape"
    with Journal.open(tmp_path / "in" / "run", create=True) as store:
        store.record_group(group_of(wicked, task_id=wicked, group_id=wicked))
        store.record_library(wicked, [])
        write_groups(tmp_path / "in" / "g.jsonl", store.groups())
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    assert sorted(p.name for p in (tmp_path / "in").iterdir()) == ["g.jsonl", "run"]


def test_other_suffixes_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.jsonl, \.jsonl\.gz or \.parquet"):
        write_groups(tmp_path / "x.pkl", [])
    with pytest.raises(ConfigError, match="no file"):
        list(read_groups(tmp_path / "x.jsonl"))
    (tmp_path / "x.parquet").write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        list(read_groups(tmp_path / "x.parquet"))


def test_a_damaged_shared_cache_entry_is_asked_for_again(tmp_path: Path) -> None:
    from tfgrpo.protocols import Completion

    path = tmp_path / "calls.db"
    with CallCache(path) as cache:
        cache.keep([(b"k" * 32, Completion("right"))])
    connection = sqlite3.connect(path)
    connection.execute("UPDATE replies SET body = replace(body, 'right', 'wrong')")
    connection.commit()
    connection.close()
    with CallCache(path) as cache:
        assert cache.find(b"k" * 32) is None
        cache.keep([(b"k" * 32, Completion("right"))])
        kept = cache.find(b"k" * 32)
        assert kept is not None and kept.text == "right"
