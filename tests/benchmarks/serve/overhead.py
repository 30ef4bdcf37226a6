"""What the gateway adds over a stub upstream, beside litellm's proxy and Portkey's gateway.

    python -m tests.benchmarks.serve.overhead [--rounds 5] [--seconds 6] [--rate 200]
        [--highest] [--record serve]
    python -m tests.benchmarks.serve.overhead --requests 100000 [--record serve]

The second measures our memory alone and adds it to what is recorded.

The rivals are looked for in two variables: LITELLM_PROXY, the `bin` folder of an environment with
`litellm[proxy]`, and PORTKEY_GATEWAY, a folder with the npm package `@portkey-ai/gateway`.

Gateways on core 0; stub and load generator on core 1. Rounds interleave; the figures are medians of
rounds. CPU a request comes from process times, the one figure that survives a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.benchmarks.record import RESULTS, commit, record
from tests.benchmarks.serve.processes import (
    cpu_s,
    load,
    pressure,
    rss_mb,
    start,
    stop,
    wait_for,
)
from tfgrpo.experience.artefact import Artefact, export_artefact
from tfgrpo.experience.library import from_texts

LESSONS = [f"Lesson {i}: name the order, the cause and the next step in one sentence." for i in
           range(12)]  # fmt: skip
_LITELLM = "from importlib.metadata import version; print(version('litellm'))"
MASTER = "sk-benchmark-master-key-of-a-gateway-1234"


def gateway_config(folder: Path, upstream: int, port: int) -> Path:
    export_artefact(Artefact(from_texts(LESSONS)), folder / "library")
    path = folder / "gateway.toml"
    path.write_text(
        f"""
[serve]
folder = "gateway"
listen = "127.0.0.1:{port}"
admin_listen = ""
[upstreams.stub]
lm = "http://127.0.0.1:{upstream}/v1#stub"
price = {{ input = 1.0, output = 2.0 }}
[routes.stub]
upstreams = ["stub"]
library = "library"
budget = {{ usd_per_day = 1000.0 }}
"""
    )
    return path


def litellm_config(folder: Path, upstream: int) -> Path:
    path = folder / "litellm.yaml"
    path.write_text(
        f"""
model_list:
  - model_name: stub
    litellm_params:
      model: openai/stub
      api_base: http://127.0.0.1:{upstream}/v1
      api_key: none
general_settings:
  master_key: {MASTER}
litellm_settings:
  telemetry: false
"""
    )
    return path


class Rivals:
    """The gateways that could be started, by name."""

    def __init__(self, folder: Path, upstream: int) -> None:
        self.jobs: dict[str, dict[str, Any]] = {"direct": {"port": upstream}}
        self.processes: dict[str, Any] = {}
        self.versions: dict[str, str] = {}
        self._folder, self._upstream = folder, upstream

    def ours(self, port: int) -> None:
        config = gateway_config(self._folder, self._upstream, port)
        self._start("ours", [sys.executable, "-m", "tfgrpo", "serve", "--config", str(config)])
        wait_for(f"http://127.0.0.1:{port}/health")
        self.jobs["ours"] = {"port": port}

    def litellm(self, port: int) -> None:
        folder = os.environ.get("LITELLM_PROXY", str(Path(sys.executable).parent))
        program = shutil.which("litellm", path=folder)
        if program is None:
            return
        config = litellm_config(self._folder, self._upstream)
        env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}
        self._start("litellm", [program, "--config", str(config), "--port", str(port),
                                "--host", "127.0.0.1", "--num_workers", "1"], env)  # fmt: skip
        try:
            wait_for(f"http://127.0.0.1:{port}/health/liveliness")
        except RuntimeError as exc:
            print(f"litellm did not start: {exc}", file=sys.stderr)
            return
        self.jobs["litellm"] = {"port": port, "key": MASTER}
        told = subprocess.run([str(Path(program).parent / "python"), "-c", _LITELLM],
                              capture_output=True, text=True, check=True)  # fmt: skip
        self.versions["litellm"] = told.stdout.strip()

    def portkey(self, port: int) -> None:
        folder = os.environ.get("PORTKEY_GATEWAY", "")
        script = Path(folder) / "node_modules/@portkey-ai/gateway/build/start-server.js"
        if not folder or not script.is_file():
            return
        self._start("portkey", ["node", str(script), f"--port={port}", "--headless"])
        wait_for(f"http://127.0.0.1:{port}/")
        package = json.loads((script.parents[1] / "package.json").read_text())
        self.versions["portkey"] = package["version"]
        self.jobs["portkey"] = {
            "port": port,
            "headers": {
                "x-portkey-provider": "openai",
                "x-portkey-custom-host": f"http://127.0.0.1:{self._upstream}/v1",
            },
        }

    def _start(self, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
        log = self._folder / f"{name}.log"
        self.processes[name] = start(command, 0, log, env)

    def stop(self) -> None:
        for process in self.processes.values():
            stop(process)


def measure(rivals: Rivals, rounds: int, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for name, where in rivals.jobs.items():
            process = rivals.processes.get(name)
            before = cpu_s(process.pid) if process else 0.0
            figures = load({**job, **where}, 1)
            spent = cpu_s(process.pid) - before if process else 0.0
            done = figures.get("requests", 0) + job.get("warm", 20)
            figures["cpu_ms"] = spent * 1e3 / max(1, done)
            found.setdefault(name, []).append(figures)
    return {name: middle(rows) for name, rows in found.items()}


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in rows[0].items():
        if isinstance(value, dict):
            out[key] = {k: sum(r[key].get(k, 0) for r in rows) for k in
                        sorted({k for r in rows for k in r[key]})}  # fmt: skip
        else:
            found = [r[key] for r in rows if r[key] is not None]
            out[key] = round(statistics.median(found), 3) if found else None
    best = [r["p99_ms"] for r in rows if r.get("p99_ms") is not None]
    if best:
        out["best_p99_ms"] = round(min(best), 3)
    return out


def highest_rate(rivals: Rivals, name: str, rates: list[int]) -> int:
    """Return the highest rate with p99 under 100 ms and no error."""
    held = 0
    for rate in rates:
        figures = load({"rate": rate, "seconds": 4, **rivals.jobs[name]}, 1)
        if (figures["p99_ms"] or 100.0) >= 100 or set(figures["statuses"]) != {"200"}:
            break
        held = rate
    return held


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--requests", type=int, default=0, help="measure memory over so many")
    parser.add_argument("--highest", action="store_true", help="look for the highest rate too")
    parser.add_argument("--record", default="", help="name of the record; empty prints it")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = [sys.executable, "-m", "tests.benchmarks.serve.stub"]
        stub = start(told, 1, folder / "stub.log", tells=True)
        assert stub.stdout is not None
        rivals = Rivals(folder, int(stub.stdout.readline()))
        try:
            rivals.ours(18080)
            if asked.requests:
                figures = memory(rivals, asked.requests)
            else:
                if asked.only != "ours":
                    rivals.litellm(18081)
                    rivals.portkey(18082)
                figures = run(rivals, asked)
        finally:
            rivals.stop()
            stop(stub)
    command = " ".join(["python -m tests.benchmarks.serve.overhead", *sys.argv[1:]])
    if asked.requests and asked.record:
        kept = RESULTS / f"{asked.record}.json"
        before = json.loads(kept.read_text())
        figures["measured"] = {"command": command, "commit": commit()}
        record(asked.record, {**before, **figures}, before["command"])
    elif asked.record:
        record(asked.record, figures, command)
    else:
        print(json.dumps(figures, indent=1))


def run(rivals: Rivals, asked: argparse.Namespace) -> dict[str, Any]:
    busy = pressure()
    steady = measure(rivals, asked.rounds, {"rate": asked.rate, "seconds": asked.seconds})
    gateways = [n for n in rivals.jobs if n != "direct"]
    added = {
        name: {
            key: round(steady[name][key] - steady["direct"][key], 3)
            for key in ("p50_ms", "p90_ms", "p99_ms")
        }
        for name in gateways
    }
    # One after the other, 20 a second: what a stream waits for. All at once: what a chunk costs.
    apart = measure(rivals, asked.rounds, {"streams": 60, "over_s": 3.0})
    at_once = measure(rivals, asked.rounds, {"streams": 100})
    for name in gateways:
        apart[name].pop("cpu_ms")
        cpu = at_once[name].pop("cpu_ms") * 20  # counted for the 20 requests that warm up elsewhere
        at_once[name]["cpu_us_a_chunk"] = round(cpu * 1e3 / (101 * 50), 2)
    begin = apart["direct"]["ttft_p50_ms"]
    ttft = {
        n: None if apart[n]["ttft_p50_ms"] is None else round(apart[n]["ttft_p50_ms"] - begin, 3)
        for n in gateways
    }
    figures: dict[str, Any] = {
        "p50_ms": added["ours"]["p50_ms"],
        "p99_ms": added["ours"]["p99_ms"],
        "cpu_ms": steady["ours"]["cpu_ms"],
        "cpu_vs_litellm": _share(steady, "litellm"),
        "cpu_vs_portkey": _share(steady, "portkey"),
        "ttft_ms": ttft["ours"],
        "rate": asked.rate,
        "steady": steady,
        "added": added,
        "streams_apart": apart,
        "streams_at_once": at_once,
        "ttft_added_ms": ttft,
        "rss_mb": {n: round(rss_mb(rivals.processes[n].pid), 1) for n in gateways},
    }
    if asked.highest:
        rates = list(range(200, 1001, 50))
        figures["highest_rate"] = {n: highest_rate(rivals, n, rates) for n in gateways}
    figures["pressure"] = {"before": busy, "after": pressure()}
    figures["versions"] = {n: _version(n) for n in ("aiohttp", "uvicorn", "orjson", "uvloop")}
    figures["versions"] |= rivals.versions
    return figures


def memory(rivals: Rivals, requests: int) -> dict[str, float]:
    """Return how our resident memory grows from a tenth of the requests to all of them."""
    pid = rivals.processes["ours"].pid
    job = {"rate": 400, "warm": 0, **rivals.jobs["ours"]}
    load({**job, "seconds": requests / 10 / 400}, 1)
    early = rss_mb(pid)
    load({**job, "seconds": requests * 0.9 / 400}, 1)
    late = rss_mb(pid)
    return {"requests": requests, "rss_early_mb": round(early, 1), "rss_late_mb": round(late, 1),
            "rss_growth_mb": round(late - early, 1)}  # fmt: skip


def _share(steady: dict[str, Any], rival: str) -> float | None:
    """Return our CPU a request as a share of a rival's; None where it did not run."""
    if rival not in steady:
        return None
    return round(float(steady["ours"]["cpu_ms"] / steady[rival]["cpu_ms"]), 3)


def _version(name: str) -> str:
    try:
        return version(name)
    except ImportError:
        return ""


if __name__ == "__main__":
    main()
