"""A large run from its first call to its report: seconds, peak memory and disk of every verb.

Each verb is a process of its own, so that its peak memory is the system's own figure; the size on
disk is the largest that the run's folder had while the verb ran, the log of the database included.
Processor seconds stand beside the wall's, which mean something on a quiet machine only.
Replies are 500 bytes of words that are drawn by the seed, each word as often as the next, so that
they pack no better than prose; there is no critic and no network. `rerun` is the
same command on the finished run; `resume` does not find its checksums, so that it goes through all
rollouts, as one does that was interrupted.

    python -m tests.benchmarks.faults.large_runs                10,000 and 100,000 rollouts
    python -m tests.benchmarks.faults.large_runs --largest      800,000 as well
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tfgrpo.config.learn import Config
from tfgrpo.learning.learn import learn
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.protocols import Request
from tfgrpo.runtime.canonical import derive_seed

SIZES = (10_000, 100_000)
LARGEST = 800_000
GROUP = 8
REPLY_BYTES = 500
HELD_OUT = 64
"""Gate tasks, and as many test tasks."""
WORDS = sorted(set(re.findall(r"[a-z]{2,}", (Path(__file__).parents[3] / "README.md").read_text())))
VERBS = ("learn", "rerun", "resume", "report", "report json", "advise", "export", "runs list")


class _Forgetful(ScriptedLM):
    """A scripted LM that keeps no list of what it was asked."""

    def _one(self, request: Request, seed: int | None) -> Any:
        reply = super()._one(request, seed)
        self.requests.clear()
        return reply


def _say(request: Request, seed: int | None) -> str:
    drawn = derive_seed(request.messages[-1].content, seed)
    end = f" The answer is {drawn % 4}"
    words = " ".join(random.Random(drawn).choices(WORDS, k=REPLY_BYTES // 2))
    return words[: REPLY_BYTES - len(end)] + end


def _open(spec: str, **options: Any) -> ScriptedLM:
    return _Forgetful(_say, model_id="scripted:large")


def config(folder: Path, rollouts: int) -> Config:
    """Return the settings of a run of about so many rollouts."""
    practice = rollouts // GROUP
    return Config.from_mapping(
        {
            "run": {"folder": str(folder / "run"), "concurrency": 64},
            "tasks": {"path": str(folder / "tasks.jsonl"), "practice": practice,
                      "gate": HELD_OUT, "test": HELD_OUT},
            "verifier": {"kind": "numeric"},
            "learn": {"epochs": 1, "batch": max(64, practice // 20), "group_size": GROUP,
                      "entries": "exemplars", "reference_exemplars": False},
            "gate": {"group_size": 2, "test_group_size": 2},
        }
    )  # fmt: skip


def write_tasks(folder: Path, rollouts: int) -> None:
    """Write as many tasks as the run needs, each with words of its own."""
    rows = []
    for i in range(rollouts // GROUP + 2 * HELD_OUT):
        text = f"Item {derive_seed('item', i):010} of shelf {i} stands in which of the rows 0 to 3?"
        rows.append({"task_id": f"t{i}", "prompt": text, "reference": i % 4})
    (folder / "tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def child(folder: Path, rollouts: int) -> None:
    """Learn, or go through what was learnt; the process ends with its own peak."""
    result = learn(config(folder, rollouts), opener=partial(_open))
    print(json.dumps({"entries": result.to_dict()["entries"]}))


def command(verb: str, folder: Path, rollouts: int) -> list[str]:
    """Return the process that does a verb."""
    run, python = str(folder / "run"), [sys.executable, "-m"]
    verbs = {
        "report": ["report", run],
        "report json": ["report", run, "--format", "json", "--out", str(folder / "report.json")],
        "advise": ["advise", run, "--json"],
        "export": ["export", run, str(folder / "groups.jsonl")],
        "runs list": ["runs", "list", str(folder)],
    }
    if verb in verbs:
        return [*python, "tfgrpo", *verbs[verb]]
    return [*python, "tests.benchmarks.faults.large_runs", "--child", str(folder), str(rollouts)]


def size_mb(folder: Path) -> float:
    """Return the space that a folder's files take, in megabytes."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:  # gone meanwhile
            continue
    return total / 1e6


def measured(verb: str, folder: Path, rollouts: int) -> dict[str, Any]:
    """Do a verb and return what it took."""
    run, most, done = folder / "run", 0.0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.1):
            most = max(most, size_mb(run))

    if verb == "resume":
        (run / "run.db-sums").unlink()
    watcher = threading.Thread(target=watch, daemon=True)
    with open(folder / "said.txt", "wb") as said:
        started = time.perf_counter()
        process = subprocess.Popen(
            command(verb, folder, rollouts), stdout=said, stderr=subprocess.STDOUT
        )
        watcher.start()
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{verb} at {rollouts:,}: {(folder / 'said.txt').read_text()[-2000:]}")
    row = {
        "rollouts": rollouts,
        "verb": verb,
        "seconds": round(seconds, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "rss_mb": round(used.ru_maxrss / 1024),
        "disk_mb": round(max(most, size_mb(run)), 1),
    }
    print(row, file=sys.stderr, flush=True)
    return row


def measure(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Make a run of each size and do every verb on it."""
    rows: list[dict[str, Any]] = []
    pages: dict[str, float] = {}
    for rollouts in sizes:
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root)
            write_tasks(folder, rollouts)
            rows += [measured(verb, folder, rollouts) for verb in VERBS]
            pages[str(rollouts)] = round((folder / "run" / "report.html").stat().st_size / 1e6, 2)
    return {"rows": rows, "page_mb": pages, "reply_bytes": REPLY_BYTES}


def main(arguments: list[str]) -> None:
    """Measure and record."""
    if arguments[:1] == ["--child"]:
        child(Path(arguments[1]), int(arguments[2]))
        return
    sizes: tuple[int, ...] = (*SIZES, LARGEST) if "--largest" in arguments else SIZES
    sizes = tuple(int(a) for a in arguments if a.isdecimal()) or sizes
    figures = measure(sizes)
    said = " ".join(["python -m tests.benchmarks.faults.large_runs", *arguments])
    record("large_runs", figures, said)


if __name__ == "__main__":
    main(sys.argv[1:])
