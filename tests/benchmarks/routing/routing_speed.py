"""Time, memory and safety of decisions: cold, warm, between threads, beside a saver.

    python -m tests.benchmarks.routing.routing_speed

An ask is `Router.ask` over the 7 models of `llmrouter`, each with 256 labels, vector at hand:
`ask_ms_7` is the median, `ask_cpu_ms_7` processor time, which other work on the machine moves less;
`load` is the machine's load average meanwhile. The large router is 50 invented models with 2,000
outcomes each on real prompts, saved, then loaded and asked in a process of its own, embedding
included. Loads beside a saver are of a second process. `benchmark_cpu_s` is the sum over the label
benchmark's sets, taken from its result file.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.record import RESULTS, record
from tests.benchmarks.routing.routing_data import embedder, load, read_table
from tfgrpo.errors import StoreError
from tfgrpo.routing.estimator.network import card
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import ValueModel
from tfgrpo.routing.records import ModelInfo, OutcomeTable, SuccessCount
from tfgrpo.routing.router import Router
from tfgrpo.routing.router_files import RouterFiles, fit_files
from tfgrpo.routing.rules import TradeOff

LABELS, DECISIONS, THREADS, ASKS = 256, 300, 8, 1200
LARGE_MODELS, LARGE_PROMPTS = 50, 2000


def small_router() -> tuple[Router, Any, Any]:
    """The router of the first bar, its set and its test prompts."""
    data = load("llmrouter")
    table, encoder = data.table, embedder()
    train, test = np.flatnonzero(data.split < 6), np.flatnonzero(data.split >= 8)
    pool = ReferencePool.fit(
        table.take(train), data.vectors[train], embedder_id=encoder.embedder_id
    )
    rng = np.random.default_rng(0)
    outcomes: list[SuccessCount] = []
    for info in table.models:
        rows = np.sort(rng.permutation(train)[:LABELS])
        outcomes += table.take(rows).outcomes(info.name)
    router = Router(
        ValueModel(encoder, pool), table.models, outcomes,
        rule=TradeOff(per_usd=10.0), fallback=table.model_names[0],
    )  # fmt: skip
    return router, data, test


def in_threads(ask: Any, total: int) -> tuple[float, float, list[BaseException]]:
    """Run `ask(i)` from several threads; seconds of wall and processor, and what was raised."""
    errors: list[BaseException] = []
    numbers = iter(range(total))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                i = next(numbers, None)
            if i is None:
                return
            try:
                ask(i)
            except BaseException as exc:
                errors.append(exc)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    wall, busy = time.perf_counter(), time.process_time()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return time.perf_counter() - wall, time.process_time() - busy, errors


def warm(router: Router, data: Any, test: Any) -> dict[str, Any]:
    """Cold start from several threads, then single decisions, then many at once."""
    table = data.table
    began = time.perf_counter()
    _, _, cold_errors = in_threads(
        lambda i: router.ask(table.prompts[test[i]], vector=data.vectors[test[i]]), THREADS
    )
    first_s, states_cold = time.perf_counter() - began, router.states_built
    times, busy = [], time.process_time()
    for i in test[:DECISIONS]:
        began = time.perf_counter()
        router.ask(table.prompts[i], vector=data.vectors[i])
        times.append(1000 * (time.perf_counter() - began))
    busy = 1000 * (time.process_time() - busy) / DECISIONS

    def ask(i: int) -> None:
        at = test[i % len(test)]
        router.ask(table.prompts[at], vector=data.vectors[at])

    wall, cpu, errors = in_threads(ask, ASKS)

    def ask_and_record(i: int) -> None:
        ask(i)
        if i % 5 == 0:
            at = test[i % len(test)]
            name = table.model_names[i % len(table.models)]
            router.record(SuccessCount(table.prompts[at], name, 1.0, prompt_id=table.keys[at]))

    wall_2, cpu_2, errors_2 = in_threads(ask_and_record, ASKS)
    return {
        "ask_ms_7": round(float(np.median(times)), 3),
        "ask_p95_ms_7": round(float(np.quantile(times, 0.95)), 3),
        "ask_cpu_ms_7": round(busy, 3),
        "first_ask_s_7": round(first_s, 3),
        "states_made_cold": states_cold,
        "asks_per_s_8_threads": round(ASKS / wall, 1),
        "asks_per_cpu_s": round(ASKS / cpu, 1),
        "asks_per_s_recording": round(ASKS / wall_2, 1),
        "asks_per_cpu_s_recording": round(ASKS / cpu_2, 1),
        "errors": len(cold_errors) + len(errors) + len(errors_2),
    }


def updated(router: Router, data: Any, test: Any) -> dict[str, Any]:
    """One new outcome: a refit that is waited for, and one that is not."""
    table, name = data.table, data.table.model_names[0]
    waited, behind = [], []
    for i in test[:10]:
        outcome = SuccessCount(table.prompts[i], name, 1.0, prompt_id=table.keys[i])
        began = time.perf_counter()
        router.record(outcome)
        router.ask(table.prompts[i], vector=data.vectors[i])
        behind.append(1000 * (time.perf_counter() - began))
        began = time.perf_counter()
        router.prepare()
        waited.append(1000 * (time.perf_counter() - began))
    router.close()
    return {
        "ask_after_new_outcome_ms": round(float(np.median(behind)), 3),
        "refit_after_new_outcome_ms": round(float(np.median(waited)), 2),
    }


def large_table() -> OutcomeTable:
    """50 invented models on 2,000 prompts of `mmlu_pro`: each a real one with cells turned over."""
    table, *_ = read_table("mmlu_pro")
    rng = np.random.default_rng(0)
    rows = np.sort(rng.permutation(len(table.keys))[:LARGE_PROMPTS])
    table = table.take(rows)
    successes = np.zeros((LARGE_PROMPTS, LARGE_MODELS))
    for j in range(LARGE_MODELS):
        real = table.successes[:, j % len(table.models)]
        turned = rng.random(LARGE_PROMPTS) < 0.1
        successes[:, j] = np.where(turned, 1 - real, real)
    return OutcomeTable(
        table.keys, table.prompts, table.datasets,
        tuple(ModelInfo(f"m{j}", f"f{j}", 1.0 + j, 2.0 + j) for j in range(LARGE_MODELS)),
        successes, np.ones_like(successes), np.full_like(successes, 200.0),
        np.full_like(successes, np.nan),
    )  # fmt: skip


def fit_large(folder: str) -> None:
    """In a process of its own: fit and save the large router."""
    table = large_table()
    outcomes = [o for name in table.model_names for o in table.outcomes(name)]
    fit_files(outcomes, table.models).save(folder)
    print(json.dumps(_used()))


def ask_large(folder: str) -> None:
    """In a process of its own: load the large router and ask it."""
    began = time.perf_counter()
    router = Router.load(folder, rule=TradeOff(1.0))
    router.ask("Which of the following is a stable isotope of carbon? A. 12 B. 14")
    first = time.perf_counter() - began
    times = []
    for i in range(30):
        began = time.perf_counter()
        router.ask(f"What is the derivative of x to the power {i}?")
        times.append(1000 * (time.perf_counter() - began))
    row = {
        "first_ask_s": round(first, 3),
        "ask_ms": round(float(np.median(times)), 2),
        "states_built": router.states_built,
        "rss_mb": _resident_mb(),
    }
    print(json.dumps(row | _used()))


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 2**20, 1)


def _used() -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "peak_mb": round(usage.ru_maxrss / 1024, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
    }


def _apart(verb: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.routing.routing_speed", verb, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def mixed_loads(folder: Path, seconds: float = 12.0) -> dict[str, Any]:
    """Load while another process saves two routers in turn; count what is neither of them."""
    command = [sys.executable, "-m", "tests.benchmarks.routing.routing_speed", "save", str(folder)]
    with subprocess.Popen(command) as saver:
        loads, refused, mixed = 0, 0, 0
        while not (folder / "current.json").exists():
            time.sleep(0.05)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                found = RouterFiles.load(folder)
                (name,) = {o.model for o in found.outcomes}
                whole = [m.name for m in found.models] == [name] == list(found.saved.states)  # type: ignore[union-attr]
                mixed += not whole
                loads += 1
            except (StoreError, ValueError):
                refused += 1
        saver.terminate()
    return {"loads": loads, "refused_loads": refused, "mixed_loads": mixed}


def save_in_turn(folder: str) -> None:
    """In a process of its own, until it is ended: save two routers in turn."""
    routers = [
        fit_files([SuccessCount(f"{m} {i}", m, float(i % 2)) for i in range(60)]) for m in "ab"
    ]
    while True:
        for router in routers:
            router.save(folder)


def main() -> None:
    """Measure and record."""
    router, data, test = small_router()
    figures: dict[str, Any] = {
        "models": len(data.table.models), "labels": LABELS, "threads": THREADS,
        "cores": os.cpu_count(),
    }  # fmt: skip
    figures |= warm(router, data, test) | updated(router, data, test)
    figures["load"] = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as folder:
        fitted = _apart("fit", Path(folder))
        asked = _apart("ask", Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        loads = mixed_loads(Path(folder))
    path = RESULTS / "routing.json"
    measured = json.loads(path.read_text())["benchmark_cpu_s"] if path.exists() else None
    weights = files("tfgrpo.routing.estimator").joinpath("network.npz").read_bytes()
    figures |= {
        "ask_ms_50": asked["ask_ms"],
        "first_ask_s_100k": asked["first_ask_s"],
        "rss_mb": asked["rss_mb"],
        "large": {"outcomes": LARGE_MODELS * LARGE_PROMPTS, "fit": fitted, **asked},
        **loads,
        "benchmark_cpu_s": measured,
        "weights_kb": round(len(weights) / 1000, 1),
        "train_cpu_s": card()["train_cpu_s"],
    }
    record("routing_speed", figures, "python -m tests.benchmarks.routing.routing_speed")


if __name__ == "__main__":
    verbs = {"fit": fit_large, "ask": ask_large, "save": save_in_turn}
    if len(sys.argv) > 2:
        verbs[sys.argv[1]](sys.argv[2])
    else:
        main()
