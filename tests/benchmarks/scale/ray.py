"""A learning run of 100,000 rollouts on a local Ray cluster while its parts are killed.

Three nodes, a fleet of four stub servers. A worker, a node and a server are killed on the way, each
several times, and come back. The same settings run in one process afterwards: the library, every
rollout and what was paid must be equal. Two small parts measure what Ray and processes add to a
rollout, and how two workers compare with one where calls take long.

Run: nice python -m tests.benchmarks.scale.ray 100000, and … overheads
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.record import RESULTS, record
from tests.learning.worlds import HELPFUL, critic_reply
from tests.workers.cluster import start_cluster, stop_cluster
from tfgrpo.config.learn import Config
from tfgrpo.learning.components import RunComponents
from tfgrpo.learning.learn import Overrides, learn_async, make_sampler, open_run, run_workers
from tfgrpo.learning.progress import QuietView
from tfgrpo.lm import open_lm
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.rollout import Task
from tfgrpo.sampling import GroupSpec
from tfgrpo.store import Journal

NODES, SERVERS, WIDTH = 3, 4, 96
PRACTICE, GATE_G, TEST_G = 64, 4, 4
LATENCY_S = 0.02
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", "a-token-of-the-benchmarks-cluster-1234")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TFGRPO_WORKER_TOKEN", "a-token-of-the-benchmarks-run")


class Servers:
    """Stub servers on fixed ports, which can be killed and come back."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "answered"
        rules = {"first_s": LATENCY_S, "slots": 512, "lesson": HELPFUL, "log": str(self.log)}
        self._rules = json.dumps(rules)
        self._running = [self._start(0) for _ in range(SERVERS)]

    def _start(self, port: int) -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, "-m", "tests.benchmarks.scale.stub", self._rules, str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}/v1" for _, port in self._running]

    def kill_one(self, place: int) -> None:
        process, port = self._running[place]
        process.kill()
        process.wait()
        time.sleep(2.0)
        self._running[place] = self._start(port)

    def close(self) -> None:
        for process, _ in self._running:
            process.kill()
            process.wait()

    def answered(self) -> Counter[str]:
        return Counter(self.log.read_text(encoding="ascii").split())


def tasks(count: int) -> list[Task]:
    """Tasks that share no words; the answer is the last word of the prompt."""
    rng = random.Random(11)
    letters = "abcdefghijklmnopqrstuvwxyz"

    def word() -> str:
        return "".join(rng.choices(letters, k=7))

    made = []
    for n in range(count):
        last = f"{word()}{n}"
        made.append(Task(f"t{n}", " ".join([*(word() for _ in range(5)), last]), last))
    return made


def settings(folder: Path, servers: Servers, rollouts: int, executor: str) -> Config:
    """A run whose gate and test make most of the rollouts."""
    gate = rollouts // 40
    test = (rollouts - gate * GATE_G * 2 - PRACTICE * 4) // (2 * TEST_G)
    return Config.from_mapping(
        {
            "run": {"folder": str(folder), "concurrency": WIDTH, "executor": executor},
            "workers": {"count": NODES},
            "tasks": {"practice": PRACTICE, "gate": gate, "test": test},
            "fleets": {"stubs": {"servers": servers.urls, "model": "stub", "hedge_share": 0.0,
                                 "health_s": 1.0, "rest_s": 2.0}},
            "policy": {"lm": "fleet:stubs", "options": {"stream": False, "supports_n": False},
                       "sampling": {"temperature": 0.7, "max_tokens": 40}},
            "critic": {"lm": "scripted:critic"},
            "verifier": {"kind": "exact"},
            "learn": {"epochs": 1, "batch": PRACTICE, "group_size": 4, "entries": "lessons",
                      "keep_share": 1.0},
            "gate": {"group_size": GATE_G, "test_group_size": TEST_G},
        }
    )  # fmt: skip


def opener(spec: str, **options: Any) -> Any:
    """The critic is scripted; everything else is what it says."""
    if spec != "scripted:critic":
        return open_lm(spec, **options)
    return ScriptedLM(lambda r, seed: critic_reply(r.messages[0].content, HELPFUL), model_id=spec)


@contextmanager
def cluster() -> Iterator[Any]:
    """A head without cores and nodes of one, with this process connected."""
    made = start_cluster(NODES, at_exit=False)
    try:
        yield made
    finally:
        stop_cluster(made)


class Killer(threading.Thread):
    """Kills a worker, a server and a node in turn, as the run goes on."""

    def __init__(self, made: Any, servers: Servers, folder: Path, rollouts: int) -> None:
        super().__init__(daemon=True)
        self._cluster, self._servers, self._folder = made, servers, folder
        share = rollouts // 10
        self._at = [share * (n + 1) for n in range(9)]
        self.kills: Counter[str] = Counter()
        self.ended = threading.Event()

    def run(self) -> None:
        kinds = [self._worker, self._server, self._node]
        for n, at in enumerate(self._at):
            while _recorded(self._folder) < at:
                if self.ended.wait(0.5):
                    return
            kinds[n % 3]()
            self.kills[kinds[n % 3].__name__.strip("_")] += 1

    def _worker(self) -> None:
        pids = _actor_pids()
        if pids:
            os.kill(random.choice(pids), signal.SIGKILL)

    def _server(self) -> None:
        self._servers.kill_one(random.randrange(SERVERS))

    def _node(self) -> None:
        node = random.choice(list(self._cluster.worker_nodes))
        self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.add_node(num_cpus=1, object_store_memory=80 << 20)


def _actor_pids() -> list[int]:
    done = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    return [int(m[1]) for m in re.finditer(r"^ *(\d+) ray::RayWorker", done.stdout, re.M)]


def _recorded(folder: Path) -> int:
    """Rollouts in a run's file, without reading it: this runs beside the run."""
    if not (folder / "run.db").exists():
        return 0
    with closing(sqlite3.connect(f"file:{folder}/run.db?mode=ro", uri=True)) as file:
        return int(file.execute("SELECT coalesce(max(rowid), 0) FROM rollouts").fetchone()[0])


def _rewards(folder: Path) -> dict[str, Any]:
    """Every rollout of a run, with how it ended."""
    with Journal.open(folder, readonly=True) as store:
        groups = list(store.groups())
    return {r.rollout_id: (r.outcome, r.reward, r.answer) for g in groups for r in g.rollouts}


def _run(config: Config, given: list[Task]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = asyncio.run(learn_async(config, tasks=given, opener=opener))
    return result, time.perf_counter() - began


def killed_run(rollouts: int) -> dict[str, Any]:
    """Run on Ray under kills, then in one process, and compare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = _given(rollouts)
        (folder / "a").mkdir()
        servers = Servers(folder / "a")
        try:
            with cluster() as made:
                killer = Killer(made, servers, folder / "ray", rollouts)
                killer.start()
                config = settings(folder / "ray", servers, rollouts, "ray")
                on_ray, seconds = _run(config, given)
                killer.ended.set()
                killer.join()
            answered = servers.answered()
        finally:
            servers.close()
        print("on Ray:", seconds, dict(killer.kills), flush=True)
        (folder / "b").mkdir()
        servers = Servers(folder / "b")
        try:
            config = settings(folder / "local", servers, rollouts, "local")
            local, local_s = _run(config, given)
        finally:
            servers.close()
        size = (folder / "local" / "run.db").stat().st_size
        there, here = _rewards(folder / "ray"), _rewards(folder / "local")
        with Journal.open(folder / "ray", readonly=True) as store:
            booked = sum(row.booked.calls for row in store.state().spend)
    return {
        "rollouts": len(there),
        "lost": len(here.keys() - there.keys())
        + sum(outcome != "graded" for outcome, *_ in there.values()),
        "paid_twice": sum(n - 1 for n in answered.values()),
        "booked_calls": booked,
        "kills": killer.kills.total(),
        "kills_by_kind": dict(killer.kills),
        "equal_rollouts": there == here,
        "same_library": on_ray.library == local.library and bool(local.library.shown),
        "journal_bytes_per_rollout": round(size / len(here)),
        "seconds": round(seconds),
        "seconds_one_process": round(local_s),
    }


def _given(rollouts: int) -> list[Task]:
    gate = rollouts // 40
    return tasks(PRACTICE + gate + (rollouts - gate * GATE_G * 2 - PRACTICE * 4) // (2 * TEST_G))


def _cpu_s(pids: list[int]) -> float:
    """Processor seconds of processes so far, their own and the system's."""
    ticks = 0
    for pid in pids:
        try:
            row = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        ticks += int(row[11]) + int(row[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _worker_pids() -> list[int]:
    done = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    mine = re.finditer(rf"^ *(\d+) .*process_main \d+ {os.getpid()}$", done.stdout, re.M)
    return [int(m[1]) for m in mine] + _actor_pids()


async def _sample(executor: str, count: int, width: int, n: int, lm: Callable[..., Any]) -> Any:
    """Return processor seconds of all processes and wall time for n rollouts, warm."""
    with tempfile.TemporaryDirectory() as name:
        config = Config.from_mapping(
            {
                "run": {"folder": f"{name}/run", "executor": executor, "concurrency": width,
                        "probe": 0},
                "workers": {"count": count},
                "policy": {"lm": "scripted:own"},
                "verifier": {"kind": "exact"},
            }
        )  # fmt: skip
        with open_run(config) as store:
            roles = RunComponents(config, store, lm)
            async with run_workers(config, roles) as workers:
                sampler = make_sampler(
                    config, roles, Overrides(), store, QuietView(), workers=workers
                )
                await sampler.groups(tasks(4 * width), GroupSpec(group_size=1, scope="warm"))
                pids = [os.getpid(), *(_worker_pids() if workers is not None else [])]
                before, began = _cpu_s(pids), time.perf_counter()
                groups = await sampler.groups(tasks(n), GroupSpec(group_size=1))
                seconds = time.perf_counter() - began
                cpu = _cpu_s(pids) - before
    assert sum(len(g.rollouts) for g in groups) == n
    return cpu, seconds


def _scripted(latency_s: float) -> Callable[..., ScriptedLM]:
    return lambda spec, **options: ScriptedLM(
        lambda request, seed: request.messages[-1].content.split()[-1],
        latency_s=latency_s, model_id=spec,
    )  # fmt: skip


def _http_ms(n: int) -> float:
    """Processor milliseconds of a rollout in one process whose call goes to a server."""
    with tempfile.TemporaryDirectory() as name:
        servers = Servers(Path(name))
        try:
            url = f"{servers.urls[0]}#stub"
            cpu, _ = asyncio.run(
                _sample("local", 1, 64, n, lambda spec, **o: open_lm(url, stream=False))
            )
        finally:
            servers.close()
    return 1000 * cpu / n


def overheads() -> dict[str, float]:
    """What a rollout costs more on workers than in one process, and how two workers scale."""
    n = 3_000
    local, _ = asyncio.run(_sample("local", 1, 64, n, _scripted(0.0)))
    processes, _ = asyncio.run(_sample("processes", 2, 64, n, _scripted(0.0)))
    figures = {"local_ms_per_rollout": 1000 * local / n,
               "local_ms_per_rollout_http": _http_ms(n),
               "overhead_ms_per_rollout_processes": 1000 * (processes - local) / n}  # fmt: skip
    with cluster():
        on_ray, _ = asyncio.run(_sample("ray", 2, 64, n, _scripted(0.0)))
        figures["overhead_ms_per_rollout"] = 1000 * (on_ray - local) / n
        width, n = 8, 480
        _, one = asyncio.run(_sample("ray", 1, width, n, _scripted(0.2)))
        _, two = asyncio.run(_sample("ray", 2, 2 * width, 2 * n, _scripted(0.2)))
        figures["efficiency_2_workers"] = one / two
        _, one = asyncio.run(_sample("processes", 1, width, n, _scripted(0.2)))
        _, two = asyncio.run(_sample("processes", 2, 2 * width, 2 * n, _scripted(0.2)))
        figures["efficiency_2_workers_processes"] = one / two
    return {name: round(value, 3) for name, value in figures.items()}


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(r[name] for r in runs), 3) for name in runs[0]}


def main() -> None:
    """Measure and record: `overheads`, or the run of so many rollouts; each keeps the other."""
    asked = sys.argv[1] if len(sys.argv) > 1 else "100000"
    if asked == "overheads":
        figures: dict[str, Any] = _medians([overheads() for _ in range(3)])
    else:
        figures = killed_run(int(asked))
    file = RESULTS / "scale_ray.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept = {k: v for k, v in kept.items() if k not in ("date", "command", "commit", "processor")}
    command = "python -m tests.benchmarks.scale.ray 100000; … overheads"
    record("scale_ray", kept | figures, command)


if __name__ == "__main__":
    main()
