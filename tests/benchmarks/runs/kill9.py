"""Fifty `kill -9` in one run of 500 rollouts, over a socket, against a run that was not killed.

The parent is the server: it answers by content and writes down who asked for what in which
session. The child is the learner; it is killed at a random moment after it has opened its journal.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tests.store.driver import (
    MODEL,
    CountingServer,
    Result,
    Settings,
    learn,
    reply_to,
    result_of,
    run_whole,
)
from tfgrpo.errors import ProviderError
from tfgrpo.protocols import Completion, Request
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.store.journal import Journal
from tfgrpo.store.keys import RequestKey

LATENCY_S = 0.03


class KeyServer:
    """Answers one line a connection: the key of a draw; counts by (session, key)."""

    def __init__(self) -> None:
        self.log: list[tuple[int, str]] = []
        self.session = 0
        self.port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._ready.wait(10)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if line:
            self.log.append((self.session, line.decode().strip()))
            await asyncio.sleep(LATENCY_S)
            writer.write(b"ok\n")
        writer.close()


class SocketLM:
    """The client of a `KeyServer`."""

    prefers_n = False
    model_id = MODEL

    def __init__(self, port: int) -> None:
        self._port = port

    @property
    def identity(self) -> dict[str, Any]:
        return {"model": self.model_id}

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        asked = RequestKey(request, self.identity).draw(current_scope().sample_index, seeds[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(asked.hex().encode() + b"\n")
            if await reader.readline() != b"ok\n":
                raise ProviderError("the connection broke", kind="connection")
        finally:
            writer.close()
        return [reply_to(asked.hex())]

    async def aclose(self) -> None:
        pass


def settings(rollouts: int) -> Settings:
    """Return the run: two steps of groups of five."""
    return Settings(tasks=rollouts // 10, group_size=5, steps=2, concurrency=4)


def child(folder: str, port: str, rollouts: str) -> None:
    """Learn until finished or killed."""
    run = settings(int(rollouts))
    with Journal.open(folder, create=True, config=run.to_config()) as store:
        print("open", flush=True)
        asyncio.run(learn(store, CountingServer(), run, SocketLM(int(port))))


def measure(kills: int, rollouts: int, seed: int = 0) -> dict[str, Any]:
    """Kill, resume, compare; return the figures."""
    rng, server, run = random.Random(seed), KeyServer(), settings(rollouts)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "killed"
        command = [sys.executable, "-m", "tests.benchmarks.runs.kill9", "child", str(folder)]
        command += [str(server.port), str(rollouts)]
        done = 0
        mean_s = LATENCY_S * rollouts / run.concurrency / kills
        while True:
            process = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert process.stdout is not None and process.stdout.readline() == b"open\n"
            try:
                process.wait(rng.uniform(0.0, 1.5 * mean_s) if done < kills else 120)
                process.stdout.close()
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                process.stdout.close()
                done += 1
                server.session += 1
        whole = run_whole(Path(root) / "whole", CountingServer(), run)
        return {
            "kills": done,
            "rollouts": rollouts,
            "concurrency": run.concurrency,
            **_compare(folder, server.log, whole),
        }


def _compare(folder: Path, log: list[tuple[int, str]], whole: Result) -> dict[str, Any]:
    with Journal.open(folder, readonly=True) as store:
        result, state = result_of(store), store.state()
        kept = store._writer.read(
            "SELECT lower(hex(c.key)), min(k.session) FROM completions c"
            " JOIN calls k ON k.call = c.call GROUP BY c.key"
        )
    # the journal's sessions count from 1, the server's from 0
    committed_in = {key: session - 1 for key, session in kept}
    asked = Counter(key for _, key in log)
    return {
        "paid_twice": sum(session > committed_in.get(key, 10**9) for session, key in log),
        "in_flight_resent": sum(asked.values()) - len(asked),
        "lost": sum(len(g["rollouts"]) for g in whole.groups) - state.rollouts,
        "booked_calls": sum(row.booked.calls for row in state.spend),
        "interruptions": state.interruptions,
        "equal": result == whole,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        figures = measure(50, 500)
        record("kill9", json.loads(json.dumps(figures)), "python -m tests.benchmarks.runs.kill9")
