"""Absurd numbers, flipped bits, links and full disks: nothing paid for is lost to them."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import sqlite3
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.driver import MODEL, PRICES, scratch
from tfgrpo.errors import StoreError
from tfgrpo.lm import open_lm
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.lm.usage import normalise_usage
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request, Sampling
from tfgrpo.rollout import MOST_TOKENS, Rollout, RolloutGroup, Score, Step, Task, Usage
from tfgrpo.runtime.files import write_whole
from tfgrpo.store.budget import Budget
from tfgrpo.store.disk import database
from tfgrpo.store.disk.files import RESERVED_BYTES
from tfgrpo.store.export import write_groups
from tfgrpo.store.journal import FILE, Journal
from tfgrpo.store.journaled_lm import JournaledLM
from tfgrpo.testing import FaultServer, say

ASK = Request((Message("user", "how much?"),), sampling=Sampling(max_tokens=10))
ABSURD = (-1, -(2**63), 2**31 - 1, 2**63 - 1, 2**64 - 1, 10**40)
FIELDS = (
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "input_tokens",
    "output_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
    "cached_tokens",
)
BROKEN = (*ABSURD, float("nan"), float("inf"), True, None, "12", 1.5, [3], {})


def asked(i: int) -> Request:
    return Request((Message("user", f"q{i}"),), sampling=Sampling(max_tokens=10))


# --- absurd numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ABSURD)
async def test_an_absurd_usage_is_estimated_flagged_and_harms_no_other_reply(
    tmp_path: Path, number: int
) -> None:
    def reply(request: Request, seed: int | None) -> Completion:
        odd = request.messages[0].content == "q3"
        usage = Usage(uncached_tokens=number if odd else 7, text_tokens=2, calls=1)
        return Completion("four", usage=usage)

    lm = ScriptedLM(reply, model_id=MODEL)
    for session in range(2):
        with Journal.open(tmp_path / "run", create=True) as store:
            journaled = JournaledLM(lm, store, prices=PRICES)
            await asyncio.gather(*(journaled.complete(asked(i), 1, [0]) for i in range(8)))
            (row,) = store.spend()
            assert row.usage.calls == 8 and row.estimated.calls == 1
            assert row.usage.prompt_tokens < 200 and store.ledger.spent["cost_usd"] < 1e-3
        assert len(lm.requests) == 8, f"session {session} paid again"


@given(
    row=st.dictionaries(
        st.sampled_from(FIELDS),
        st.one_of(st.sampled_from(BROKEN), st.integers(0, 10**6)),
    ),
    details=st.dictionaries(
        st.sampled_from(["cached_tokens", "reasoning_tokens", "cache_write_tokens"]),
        st.one_of(st.sampled_from(BROKEN), st.integers(0, 10**6)),
    ),
)
def test_any_report_of_usage_gives_believable_counts_and_an_absurd_one_is_flagged(
    row: dict[str, object], details: dict[str, object]
) -> None:
    report = row | {"prompt_tokens_details": details, "completion_tokens_details": details}
    usage = normalise_usage(report, prompt_chars=40, reply_chars=20)
    for name in ("uncached", "cache_read", "cache_write", "text", "reasoning"):
        assert 0 <= getattr(usage, f"{name}_tokens") <= MOST_TOKENS
    shown = [*row.values(), *details.values()]
    if any(v in ABSURD for v in shown if type(v) is int):
        assert usage.is_estimated


def test_a_bill_of_minus_one_over_the_wire_is_estimated() -> None:
    bill = {"prompt_tokens": 2**64 - 1, "completion_tokens": -1, "total_tokens": 2**64 - 2}

    async def run(spec: str) -> Usage:
        (reply,) = await open_lm(spec).complete(ASK, 1, [0])
        return reply.usage

    with FaultServer(say("four", usage=bill)) as server:
        usage = asyncio.run(run(server.spec()))
    assert usage.is_estimated and 0 < usage.total_tokens < 50


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bad=st.lists(st.integers(0, 19), max_size=5), value=st.sampled_from([2**63, -(2**70)]))
def test_rows_that_no_file_can_hold_are_set_aside_and_the_batch_is_kept(
    bad: list[int], value: int
) -> None:
    async def run(store: Journal) -> None:
        await asyncio.gather(
            *(
                store._writer.commit(
                    [("INSERT INTO hits VALUES (?, ?, ?)", ("s", "m", value if i in bad else 1))]
                )
                for i in range(20)
            )
        )

    with scratch() as folder:
        with Journal.open(Path(folder) / "run", create=True) as store:
            asyncio.run(asyncio.wait_for(run(store), 60))
        with Journal.open(Path(folder) / "run") as store:
            assert store._writer.read("SELECT count(*) FROM hits") == [(20 - len(set(bad)),)]
            aside = store._writer.read("SELECT why FROM set_aside WHERE tbl = 'hits'")
    assert len(aside) == len(set(bad)) and all("OverflowError" in why for (why,) in aside)


def test_a_journal_that_holds_an_absurd_number_already_is_read_and_counts_its_worst_case(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    usage = Usage(uncached_tokens=5, text_tokens=1, calls=1)
    lm = ScriptedLM(lambda request, seed: Completion("x", usage=usage), model_id=MODEL)

    async def fill(store: Journal) -> None:
        for i in range(3):
            await JournaledLM(lm, store, prices=PRICES).complete(asked(i), 1, [0])

    with Journal.open(folder, create=True) as store:
        asyncio.run(fill(store))
    with sqlite3.connect(folder / FILE) as raw:  # as an earlier version wrote it
        raw.execute("UPDATE results SET uncached = 9223372036854775807 WHERE call = 2")
        raw.execute("UPDATE results SET text = 9223372036854775807 WHERE call = 3")
    for readonly in (True, False):
        with Journal.open(folder, readonly=readonly) as store:
            (row,) = store.spend()
            assert row.usage.prompt_tokens == 5 and row.booked.calls == 2
            assert row.booked.completion_tokens == 20
            assert store.state().spend == (row,)


# --- flipped bits ---------------------------------------------------------------------------------


def fill(folder: Path) -> None:
    """Write a run of three groups with a library, decisions and settings."""
    with Journal.open(folder, create=True, config={"learn": {"seed": 1}}) as store:
        for i in range(3):
            rollouts = tuple(
                Rollout(
                    f"g{i}-{k}", f"t{i}", (Step(Message("assistant", f"answer {k} " * 20)),)
                ).graded(Score(float(k)))
                for k in range(2)
            )
            group = RolloutGroup(f"g{i}", Task(f"t{i}", f"question {i} " * 20, 4), rollouts)
            store.record_group(group)
            store.record_library(f"v{i}", {"entries": [f"lesson {i}"]})
            store.record_decision("gate", {"accepted": True}, key=f"v{i}")


def read_all(folder: Path) -> tuple[int, list[str]]:
    with Journal.open(folder, readonly=True) as store:
        groups = list(store.groups())
        store.state(), store.spend(), store.libraries(), store.decisions("gate"), store.config
        for i in range(3):
            store.find_rollout(f"g{i}-0", "")
        return len(groups), store.damaged


@pytest.mark.parametrize(
    ("table", "left"), [("rollouts", 2), ("texts", 2), ("groups", 2), ("libraries", 3)]
)
@pytest.mark.parametrize("bit", [0x80, 0x01, 0x20])
def test_a_flipped_bit_in_one_value_loses_that_value_alone(
    tmp_path: Path, table: str, left: int, bit: int
) -> None:
    folder = tmp_path / "run"
    fill(folder)
    with sqlite3.connect(folder / FILE) as raw:
        sql = f"SELECT rowid, body FROM {table} ORDER BY rowid DESC LIMIT 1"
        key = "rowid"
        if table == "texts":
            key = "digest"
            sql = "SELECT digest, body FROM texts WHERE body LIKE '%question 2%'"
        row, body = raw.execute(sql).fetchone()
        data = bytearray(body.encode())
        data[len(data) // 2] ^= bit
        raw.execute(
            f"UPDATE {table} SET body = CAST(? AS TEXT) WHERE {key} = ?", (bytes(data), row)
        )
    groups, damaged = read_all(folder)
    assert groups == left and damaged
    with Journal.open(folder) as store:  # and a resume goes on
        assert store.state().library == {"entries": ["lesson 1" if table == "libraries" else
                                                     "lesson 2"]}  # fmt: skip


def test_flipped_bits_anywhere_in_the_file_end_in_a_reading_or_in_an_error_of_ours(
    tmp_path: Path,
) -> None:
    fill(tmp_path / "whole")
    whole = (tmp_path / "whole" / FILE).read_bytes()
    rng = random.Random(5)
    for trial in range(150):
        folder = tmp_path / f"run{trial}"
        folder.mkdir()
        data = bytearray(whole)
        data[rng.randrange(100, len(data))] ^= 1 << rng.randrange(8)
        (folder / FILE).write_bytes(bytes(data))
        try:
            groups, damaged = read_all(folder)
        except StoreError:
            continue
        assert groups == 3 or damaged or groups <= 3


def test_damaged_settings_are_told_and_the_run_opens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / FILE) as raw:
        raw.execute("UPDATE meta SET value = '{\"learn\": {\"se' WHERE name = 'config'")
    with Journal.open(tmp_path / "run", config={"learn": {"seed": 2}}) as store:
        assert store.config == {"learn": {"seed": 2}}
    assert "settings are damaged" in caplog.text


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lock", FILE, f"{FILE}-wal", "reserve", f"{FILE}.part"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_a_run_folder_is_refused_and_its_target_left_alone(
    tmp_path: Path, name: str, exists: bool
) -> None:
    target = tmp_path / "precious"
    if exists:
        target.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(target)
    for readonly in (False, True):
        with pytest.raises(StoreError, match=r"is a link|there is no run"):
            Journal.open(folder, create=not readonly, readonly=readonly)
    assert target.exists() == exists and (not exists or target.read_text() == "mine")


@pytest.mark.parametrize("name", ["lock", "reserve"])
def test_a_file_with_a_second_name_is_not_emptied_and_the_run_can_be_read(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "run"
    Journal.open(folder, create=True).close()
    other = tmp_path / "other"
    other.write_text("mine")
    (folder / name).unlink(missing_ok=True)
    os.link(other, folder / name)
    with pytest.raises(StoreError, match="is a hard link"):
        Journal.open(folder)
    Journal.open(folder, readonly=True).close()
    assert other.read_text() == "mine"


def test_written_files_replace_a_link_and_are_their_owners_alone(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    for name, write in (
        ("page.html", lambda p: write_whole(p, "page")),
        ("groups.jsonl", lambda p: write_groups(p, [])),
    ):
        path = tmp_path / name
        path.symlink_to(target)
        write(path)
        assert target.read_text() == "mine" and not path.is_symlink()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- full disks -----------------------------------------------------------------------------------


def test_a_disk_without_room_is_noticed_before_anything_is_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="disk is full"):
        Journal.open(tmp_path / "run", create=True)
    assert not (tmp_path / "run" / "reserve").exists()
    monkeypatch.undo()
    Journal.open(tmp_path / "run", create=True).close()


async def test_a_disk_that_fills_keeps_what_is_in_flight_and_stops_new_calls_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()

    class Slow(ScriptedLM):
        async def complete(
            self, request: Request, n: int, seeds: Sequence[int | None]
        ) -> list[Completion]:
            replies = await super().complete(request, n, seeds)
            await gate.wait()
            return replies

    lm = Slow("four")
    store = Journal.open(tmp_path / "run", create=True)
    journaled = JournaledLM(lm, store)
    flying = [asyncio.ensure_future(journaled.complete(asked(i), 1, [0])) for i in range(8)]
    while len(lm.requests) < 8:
        await asyncio.sleep(0)
    write = database.DatabaseWriter._write

    def fails_while_reserved(
        self: database.DatabaseWriter, batch: list[database.Statement]
    ) -> None:
        if (tmp_path / "run" / "reserve").exists():
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorname = "SQLITE_FULL"
            raise error
        write(self, batch)

    monkeypatch.setattr(database.DatabaseWriter, "_write", fails_while_reserved)
    gate.set()
    assert [(await f)[0].text for f in flying] == ["four"] * 8
    with pytest.raises(StoreError, match=r"disk of .* is full"):
        await journaled.complete(asked(99), 1, [0])
    assert len(lm.requests) == 8
    store.close()
    monkeypatch.undo()
    with Journal.open(tmp_path / "run") as again:  # room again: nothing is paid twice
        for i in range(8):
            await JournaledLM(lm, again).complete(asked(i), 1, [0])
        await JournaledLM(lm, again).complete(asked(99), 1, [0])
    assert len(lm.requests) == 9


async def test_calls_that_were_refused_for_a_failed_write_stand_in_no_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = ScriptedLM("four")
    store = Journal.open(tmp_path / "run", create=True)
    journaled = JournaledLM(lm, store)
    await journaled.complete(asked(0), 1, [0])
    write, failures = database.DatabaseWriter._write, [sqlite3.OperationalError("disk I/O error")]

    def fails_once(self: database.DatabaseWriter, batch: list[database.Statement]) -> None:
        if failures and len(batch) > 50:
            raise failures.pop()
        write(self, batch)

    async def ask(i: int) -> str:
        try:
            return (await journaled.complete(asked(i), 1, [0]))[0].text
        except StoreError:
            # The next write, before the others that were refused have had a turn.
            store.record_decision("note", {"refused": i}, key=f"{i}")
            return "refused"

    monkeypatch.setattr(database.DatabaseWriter, "_write", fails_once)
    replies = await asyncio.gather(*(ask(i) for i in range(1, 201)))
    assert replies == ["refused"] * 200 and not failures
    assert len(lm.requests) == 1
    store.close()
    with Journal.open(tmp_path / "run") as again:
        assert again.writer.read("SELECT count(*) FROM calls") == [(1,)]
        assert len(again.decisions("note")) == 200


def test_the_reserve_is_gone_after_an_orderly_end_and_taken_over_after_a_kill(
    tmp_path: Path,
) -> None:
    reserve = tmp_path / "run" / "reserve"
    store = Journal.open(tmp_path / "run", create=True, budget=Budget(calls=1))
    assert reserve.stat().st_size == RESERVED_BYTES
    store.abandon()
    assert reserve.exists()
    Journal.open(tmp_path / "run").close()
    assert not reserve.exists()
