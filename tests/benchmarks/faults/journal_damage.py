"""Flipped bits and cut files in a run's journal, in every state that a journal can be in.

A run is kept in three states: closed in order, left behind by a killed process (with a log, after
the log was moved into the file and before), and open in a living writer. In a copy of one of them a
random bit of a journal's file is flipped, or the file is cut; then the journal is looked at and
opened for writing, and everything that it says is compared with what was written.

    silent    something is wrong or missing and nothing was told
    wrong     a group, library, decision or reply differs from what was written, told or not
    raw       an exception that is not ours
    locked    the journal can no longer be opened
    readable  the share of what was written that is still there, after flips and after cuts

Of some copies the same run is done again to the end: its result must be that of the undamaged run.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import random
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tests.learning.worlds import HELPFUL, World, comparable
from tests.learning.worlds import settings as run_settings
from tests.store.driver import scratch
from tfgrpo.cli.main import main as command_line
from tfgrpo.errors import TfgrpoError
from tfgrpo.learning.result import Result
from tfgrpo.runtime.canonical import canonical_json
from tfgrpo.store import Journal
from tfgrpo.store.disk import database

FLIPS = 1_000
CUTS = 200
SEED = 20_260_731
WHOLE_RUNS = 60
"""Of so many damaged copies the run is done again, and shown."""
JOURNAL = ("run.db", "run.db-wal", "run.db-sums")
Items = dict[str, str]


def said(journal: Journal) -> Items:
    """Return all that a journal says, item by item."""
    items: Items = {}
    for group in journal.groups():
        items[f"group {group.group_id}"] = canonical_json(group.to_dict())
    for figures in journal.figures():
        items[f"figures {figures.group_id}"] = repr(figures)
    for number, (name, payload) in enumerate(journal.libraries()):
        items[f"library {number}"] = canonical_json([name, payload])
    for kind in journal.state().decisions:
        for number, (key, payload) in enumerate(journal.decisions(kind)):
            items[f"decision {kind} {key} {number if not key else ''}"] = canonical_json(payload)
    for row in journal.spend():
        items[f"spend {row.stage} {row.model}"] = canonical_json(row.to_dict())
    items["config"] = canonical_json(journal.config)
    state = journal.state()
    items["state"] = repr((state.rollouts, dict(state.outcomes), state.truncated, state.groups,
                           state.library_id, dict(state.decisions)))  # fmt: skip
    return items


def replies(journal: Journal, keys: list[bytes]) -> Items:
    """Return the replies under their keys, as a call would find them."""
    found = ((key, journal.calls.find_reply(key)) for key in keys)
    return {f"reply {key.hex()}": repr(reply) for key, reply in found if reply is not None}


class State:
    """A run's folder in one state, and what is in it.

    Args:
        folder: never changed; copies of it are damaged.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        with copied(folder) as copy, Journal.open(copy, readonly=True) as journal:
            self.keys = [k for (k,) in journal._writer.read("SELECT key FROM completions")]
            self.items = said(journal) | replies(journal, self.keys)


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """Yield a copy of a run's folder."""
    with scratch() as root:
        copy = Path(root) / "run"
        shutil.copytree(folder, copy)
        yield copy


def states(root: Path) -> list[State]:
    """Return the same run in every state."""
    made: list[State] = []
    World(lesson=HELPFUL).learn(run_settings(root / "closed"))
    made.append(State("closed", root / "closed" / "run"))
    for every in (10_000, 150):
        database.CHECKPOINT_EVERY = every
        for kill_at in (120, 230):
            folder = root / f"killed-{every}-{kill_at}"
            snapshots: list[Path] = []

            def snap(folder: Path = folder, snapshots: list[Path] = snapshots) -> None:
                snapshots.append(folder / "snapshot")
                shutil.copytree(folder / "run", folder / "snapshot")

            world = Snapped(kill_at, snap)
            world.learn(run_settings(folder))
            made.append(State(f"killed, log moved every {every} rows", snapshots[0]))
    return made


class Snapped(World):
    """A world in which the folder is copied at some call: what a process killed then leaves."""

    def __init__(self, at: int, snap: Callable[[], None]) -> None:
        super().__init__(lesson=HELPFUL)
        self._at, self._snap = at, snap

    def _count(self, seed: int | None) -> None:
        super()._count(seed)
        if self.calls == self._at:
            self._snap()


def of_result(result: Result) -> dict[str, Any]:
    """Return what a run came to, apart from its spend, which a lost result of a call changes."""
    return {name: value for name, value in comparable(result).items() if name != "spend"}


def flip(folder: Path, rng: random.Random) -> str:
    """Flip one bit of the journal's files, each bit as likely as any other."""
    files = [folder / name for name in JOURNAL if (folder / name).exists()]
    sizes = [file.stat().st_size for file in files]
    file = rng.choices(files, sizes)[0]
    raw = bytearray(file.read_bytes())
    at = rng.randrange(8 * len(raw))
    raw[at // 8] ^= 1 << at % 8
    file.write_bytes(raw)
    return f"{file.name} bit {at}"


def cut(folder: Path, rng: random.Random) -> str:
    """Cut the journal's file at a random place."""
    file = folder / "run.db"
    to = rng.randrange(file.stat().st_size)
    with open(file, "r+b") as opened:
        opened.truncate(to)
    return f"{file.name} cut to {to}"


def shell(arguments: list[str]) -> tuple[int, str]:
    """Run a command; return how it ended and what it printed on standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line(arguments)
        except SystemExit as ended:
            return (ended.code if isinstance(ended.code, int) else 0), err.getvalue()
    return 0, err.getvalue()


class Told(logging.Handler):
    """Whether anything was said of damage."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.any = False

    def emit(self, entry: logging.LogRecord) -> None:
        """Note it."""
        self.any = True


class Bench:
    """Counts what comes of damaged journals."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.readable: dict[str, list[float]] = {"flips": [], "cuts": []}
        self.told = Told()
        logger = logging.getLogger("tfgrpo")
        logger.addHandler(self.told)
        logger.propagate = False

    def take(self, kept: Path | None) -> int:
        """Go on with what was kept; return how many cases that is."""
        if kept is None or not kept.exists():
            return 0
        row = json.loads(kept.read_text())
        self.counts, self.readable = Counter(row["counts"]), row["readable"]
        return int(row["done"])

    def keep(self, kept: Path | None, done: int) -> None:
        """Keep the counts so far."""
        if kept is not None:
            row = {"counts": self.counts, "readable": self.readable, "done": done}
            kept.write_text(json.dumps(row))

    def judge(self, what: str, state: State, found: Items, *, is_told: bool) -> None:
        """Count what differs from what was written."""
        wrong = [
            name for name, value in found.items()
            if state.items.get(name) != value and not name.startswith(("spend", "state"))
            and not (name == "config" and value == "null")
        ]  # fmt: skip
        if wrong:
            self.counts["wrong"] += 1
            print("wrong", state.name, what, wrong[:3], file=sys.stderr)
        if found != state.items and not is_told:
            self.counts["silent"] += 1
            missing = [n for n, v in state.items.items() if found.get(n) != v]
            print("silent", state.name, what, missing[:5], file=sys.stderr)

    def case(
        self, kind: str, state: State, harm: Callable[[Path, random.Random], str],
        rng: random.Random,
    ) -> None:  # fmt: skip
        """Damage a copy, look, open, and open again."""
        with copied(state.folder) as folder:
            is_living = state.name == "closed" and rng.random() < 0.33
            living = Journal.open(folder) if is_living else None
            what = f"{'open, ' if is_living else ''}{harm(folder, rng)}"
            self.counts[f"{'open' if is_living else state.name.partition(',')[0]} {kind}"] += 1
            try:
                self._look(what, state, folder, readonly=True)
                if living is not None:
                    living.close()
                self._look(what, state, folder, readonly=False)
            except TfgrpoError as exc:
                self.counts["refused"] += 1
                print("refused", state.name, what, exc, file=sys.stderr)
            except Exception:
                self.counts["raw"] += 1
                print("raw", state.name, what, file=sys.stderr)
                traceback.print_exc(limit=-4)
            try:
                with Journal.open(folder) as journal:
                    found = said(journal) | replies(journal, state.keys)
                kept = sum(found.get(n) == v for n, v in state.items.items())
                self.readable[kind].append(kept / len(state.items))
            except Exception as exc:
                self.counts["locked"] += 1
                print("locked", state.name, what, exc, file=sys.stderr)

    def _look(self, what: str, state: State, folder: Path, *, readonly: bool) -> None:
        self.told.any = False
        with Journal.open(folder, readonly=readonly) as journal:
            found = said(journal) | replies(journal, state.keys)
            is_told = self.told.any or bool(journal.damaged)
        self.judge(what, state, found, is_told=is_told)

    def whole_run(
        self, root: Path, harm: Callable[[Path, random.Random], str], rng: random.Random,
        wanted: dict[str, Any],
    ) -> None:  # fmt: skip
        """Damage a finished run, show it in every way, and do it again."""
        with scratch() as folder:
            shutil.copytree(root / "closed", folder, dirs_exist_ok=True)
            run = Path(folder) / "run"
            what = harm(run, rng)
            for args in (
                ["report", str(run), "--format", "json"],
                ["runs", "list", folder],
                ["export", str(run), str(run / "out.jsonl")],
                ["library", "show", str(run)],
            ):
                code, printed = shell(args)
                if code not in (0, 2, 6) or "a bug of ours" in printed:
                    self.counts["raw"] += 1
                    print("raw", args, what, code, printed[-300:], file=sys.stderr)
            world = World(lesson=HELPFUL)
            result = of_result(world.learn(run_settings(Path(folder))))
            self.counts["whole_runs"] += 1
            self.counts["paid_again"] += world.calls
            if json.dumps(result, default=str) != json.dumps(wanted, default=str):
                self.counts["other_result"] += 1
                print("other result", what, file=sys.stderr)


def measure(flips: int, cuts: int, whole_runs: int, kept: Path | None = None) -> dict[str, Any]:
    """Damage copies and count what becomes of them.

    Args:
        kept: where the counts so far are kept, so that a run that was stopped goes on.
    """
    bench = Bench()
    done = bench.take(kept)
    with scratch() as root:
        every = database.CHECKPOINT_EVERY
        found = states(Path(root))
        database.CHECKPOINT_EVERY = every
        with copied(found[0].folder) as copy:
            wanted = of_result(World(lesson=HELPFUL).learn(run_settings(copy.parent)))
        for number in range(done, flips + cuts + whole_runs):
            rng = random.Random(SEED + number)
            kind, harm = ("flips", flip) if number < flips else ("cuts", cut)
            if number < flips + cuts:
                weights = [len(found) - 1.0] + [1.0] * (len(found) - 1)
                bench.case(kind, rng.choices(found, weights)[0], harm, rng)
            else:
                bench.whole_run(Path(root), cut if number % 3 == 2 else flip, rng, wanted)
            bench.keep(kept, number + 1)
    counts = bench.counts
    shares = {kind: round(sum(s) / len(s), 4) if s else None for kind, s in bench.readable.items()}
    bad = ("silent", "wrong", "raw", "locked", "refused", "other_result")
    return {
        "flips": flips,
        "truncations": cuts,
        **{name: counts.pop(name, 0) for name in bad},
        "readable_after_flips": shares["flips"],
        "readable_after_truncations": shares["cuts"],
        "whole_runs": counts.pop("whole_runs", 0),
        "calls_paid_again_in_whole_runs": counts.pop("paid_again", 0),
        "of_state": dict(sorted(counts.items())),
        "seed": SEED,
    }


def main(arguments: list[str]) -> None:
    """Measure and record."""
    kept = Path(arguments.pop()) if arguments and not arguments[-1].isdecimal() else None
    asked = [int(a) for a in arguments] or [FLIPS, CUTS, WHOLE_RUNS]
    record(
        "journal_damage",
        measure(asked[0], asked[1], asked[2], kept),
        "python -m tests.benchmarks.faults.journal_damage",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
