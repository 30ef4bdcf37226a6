"""The gateway under load, killed with -9 again and again: what was acknowledged is there.

    python -m tests.benchmarks.serve.crash [--kills 50] [--cap 0.6]

64 clients ask, give feedback and retry with Idempotency-Keys. The process is killed at a random
moment, started again on the same folder, and so on. Afterwards: every acknowledged feedback is in
the journal once, no reply that a client got under its key was paid twice, and the cap was never
passed by what was spent or may have been. The cap fills on the way: `kills_before_cap` says how
many kills met a gateway that still paid for calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.benchmarks.record import record
from tests.benchmarks.serve.processes import ROOT, pressure, stop, wait_for

CLIENTS = 64


def config(folder: Path, upstream: int, port: int, cap: float) -> Path:
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
rest_s = 0.0
[routes.stub]
upstreams = ["stub"]
budget = {{ usd_total = {cap} }}
"""
    )
    return path


def spawn(*command: str, log: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=log.open("a"),
        text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip


class Clients:
    """64 clients that never give up, and what was acknowledged to them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.acknowledged: list[str] = []
        self.answered: dict[str, str] = {}
        self.changed = 0
        self.refused = 0
        self.kills_before_cap = 0
        self.is_over = False
        self._rng = random.Random(1)

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=20)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._client(session, i) for i in range(CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while not self.is_over:
            turn += 1
            key = f"k{number}-{turn}"
            reply = await self._ask(session, key)
            if reply is None:
                return
            again = await self._ask(session, key) if turn % 3 == 0 else reply
            if again is not None and again != reply:
                self.changed += 1
            await self._rate(session, reply, f"e{number}-{turn}")

    async def _ask(self, session: aiohttp.ClientSession, key: str) -> str | None:
        body = {"model": "stub", "messages": [{"role": "user", "content": f"question {key}"}],
                "max_tokens": 50}  # fmt: skip
        while not self.is_over:
            try:
                async with session.post(
                    f"{self._url}/v1/chat/completions", json=body,
                    headers={"idempotency-key": key},
                ) as response:  # fmt: skip
                    row = await response.json()
                    if response.status == 200:
                        self.answered[key] = row["id"]
                        return str(row["id"])
                    self.refused += response.status == 429
            except (aiohttp.ClientError, OSError, TimeoutError, json.JSONDecodeError):
                pass
            await asyncio.sleep(0.05 + self._rng.random() * 0.1)
        return None

    async def _rate(self, session: aiohttp.ClientSession, response_id: str, event: str) -> None:
        body = {"response_id": response_id, "value": 1, "event_id": event}
        while not self.is_over:
            try:
                async with session.post(f"{self._url}/v1/feedback", json=body) as response:
                    if response.status in (200, 201):
                        self.acknowledged.append(event)
                        return
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            await asyncio.sleep(0.05)


async def storm(folder: Path, upstream: int, kills: int, cap: float) -> Clients:
    port = 18085
    path = config(folder, upstream, port, cap)
    url = f"http://127.0.0.1:{port}"
    clients = Clients(url)
    running = asyncio.ensure_future(clients.run())
    rng = random.Random(7)
    log = folder / "gateway.log"
    for _ in range(kills):
        process = spawn("tfgrpo", "serve", "--config", str(path), log=log)
        await asyncio.to_thread(wait_for, f"{url}/health", 60.0)
        await asyncio.sleep(0.05 + rng.random() * 0.6)
        clients.kills_before_cap += not clients.refused
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
    process = spawn("tfgrpo", "serve", "--config", str(path), log=log)
    await asyncio.to_thread(wait_for, f"{url}/health", 60.0)
    await asyncio.sleep(1.0)
    clients.is_over = True
    await running
    await asyncio.to_thread(stop, process)
    return clients


def look(folder: Path, clients: Clients, cap: float) -> dict[str, Any]:
    file = sqlite3.connect(folder / "gateway" / "run.db")
    events = [e for (e,) in file.execute("SELECT event_id FROM feedback WHERE event_id <> ''")]
    kept: dict[str, set[str]] = {}
    for key, response_id in file.execute("SELECT idempotency_key, response_id FROM idempotency"):
        kept.setdefault(key, set()).add(response_id)
    spent, worst = file.execute(
        "SELECT sum(CASE WHEN r.kind = 'ok' THEN r.cost_usd END),"
        " sum(CASE WHEN r.kind = 'ok' THEN r.cost_usd WHEN r.kind IN ('rejected', 'not_sent')"
        " THEN 0 ELSE c.cost_usd END) FROM calls c LEFT JOIN results r ON r.call = c.call"
    ).fetchone()
    open_calls = file.execute(
        "SELECT count(*) FROM calls c LEFT JOIN results r ON r.call = c.call WHERE r.call IS NULL"
    ).fetchone()[0]
    integrity = file.execute("PRAGMA integrity_check").fetchone()[0]
    file.close()
    lost = set(clients.acknowledged) - set(events)
    missing = [k for k, reply in clients.answered.items()
               if reply.removeprefix("chatcmpl-") not in kept.get(k, set())]  # fmt: skip
    return {
        "acknowledged": len(clients.acknowledged),
        "feedback_lost": len(lost),
        "counted_twice": len(events) - len(set(events)),
        "answered": len(clients.answered),
        "paid_twice": sum(len(kept.get(k, ())) > 1 for k in clients.answered),
        "answered_not_kept": len(missing),
        "replies_changed": clients.changed,
        "refused_by_cap": clients.refused,
        "kills_before_cap": clients.kills_before_cap,
        "cap_usd": cap,
        "spent_usd": round(spent or 0.0, 6),
        "spent_at_worst_usd": round(worst or 0.0, 6),
        "cap_violations": int((worst or 0.0) > cap + 1e-9),
        "calls_in_flight_when_killed": open_calls,
        "integrity": integrity,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--cap", type=float, default=0.6, help="dollars of the route's calls")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stub = spawn("tests.benchmarks.serve.stub", log=folder / "stub.log")
        assert stub.stdout is not None
        try:
            port = int(stub.stdout.readline())
            clients = asyncio.run(storm(folder, port, asked.kills, asked.cap))
        finally:
            stop(stub)
        figures = {"kills": asked.kills, "clients": CLIENTS, **look(folder, clients, asked.cap)}
    figures["seconds"] = round(time.monotonic() - began, 1)
    figures["pressure"] = pressure()
    record("serve_crash", figures, "python -m tests.benchmarks.serve.crash")


if __name__ == "__main__":
    main()
