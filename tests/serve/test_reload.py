"""Settings that are read anew while the gateway runs."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.serve.conftest import Client, Start, settings
from tests.serve.test_process import ASKED, ask, program, toml
from tfgrpo.errors import ConfigError
from tfgrpo.experience.artefact import Artefact, export_artefact
from tfgrpo.experience.library import from_texts
from tfgrpo.serve.access.keys import hash_key, new_key
from tfgrpo.serve.settings import GatewaySettings
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer


def library(folder: Path, text: str) -> str:
    export_artefact(Artefact(from_texts([text])), folder)
    return str(folder)


def reread(client: Client, upstream: FaultServer, **changes: Any) -> str:
    def read() -> GatewaySettings:
        return settings(client.gateway.folder, upstream, **changes)

    return client.running.reload(read)


async def test_routes_aliases_and_models_change_while_a_request_runs(start: Start) -> None:
    with FaultServer(answers.say("slow").after(0.5)) as old, FaultServer() as new:
        client = await start(old)
        running = asyncio.ensure_future(client.chat())
        while not old.calls:
            await asyncio.sleep(0.01)
        told = reread(client, new, routes={"r": {"aliases": ["other"]}})
        assert "read anew" in told
        async with client.post("/v1/chat/completions", ASKED | {"model": "other"}) as response:
            assert response.status == 200
        assert (await running)[0] == 200
    assert (old.call_count, new.call_count) == (1, 1)


async def test_a_cap_that_changes_forgets_nothing_that_was_spent_or_is_in_flight(
    start: Start,
) -> None:
    cap = {"r": {"budget": {"calls_per_day": 5}}}
    with FaultServer(answers.say("x").after(0.3)) as upstream:
        client = await start(upstream, routes=cap)
        assert (await client.chat())[0] == 200
        running = asyncio.ensure_future(client.chat())
        while upstream.call_count < 2:
            await asyncio.sleep(0.01)
        reread(client, upstream, routes={"r": {"budget": {"calls_per_day": 3}}})
        third = await client.chat()
        status, body, _ = await client.chat()
        assert third[0] == (await running)[0] == 200
    assert status == 429 and body["error"]["code"] == "budget_exceeded"
    assert upstream.call_count == 3


async def test_a_key_that_is_taken_out_is_refused_with_the_next_request(start: Start) -> None:
    key, other = new_key(), new_key()
    with FaultServer() as upstream:
        client = await start(upstream, keys={"a": {"hash": hash_key(key)}})
        bearer = {"headers": {"authorization": f"Bearer {key}"}}
        assert (await client.chat(**bearer))[0] == 200
        reread(client, upstream, keys={"b": {"hash": hash_key(other)}})
        assert (await client.chat(**bearer))[0] == 401
        bearer = {"headers": {"authorization": f"Bearer {other}"}}
        assert (await client.chat(**bearer))[0] == 200


async def test_a_configured_library_that_changes_is_in_force_for_new_sessions(
    start: Start, tmp_path: Path
) -> None:
    first = library(tmp_path / "one", "Name the unit.")
    second = library(tmp_path / "two", "Round down.")
    with FaultServer() as upstream:
        client = await start(upstream, routes={"r": {"library": first}})
        _, _, before = await client.chat(tfgrpo={"session_id": "s"})
        reread(client, upstream, routes={"r": {"library": second}})
        _, _, kept = await client.chat(tfgrpo={"session_id": "s"})
        _, _, after = await client.chat()
    assert kept["x-tfgrpo-library"] == before["x-tfgrpo-library"] != after["x-tfgrpo-library"]
    assert "Round down." in upstream.calls[-1].body["messages"][0]["content"]


async def test_a_library_that_cannot_be_read_leaves_the_old_one_and_is_named(
    start: Start, tmp_path: Path
) -> None:
    folder = library(tmp_path / "one", "Name the unit.")
    with FaultServer() as upstream:
        changes: Any = {"routes": {"r": {"library": folder}}}
        client = await start(upstream, serve={"admin_listen": "127.0.0.1:0"}, **changes)
        file = Path(folder) / "library.json"
        whole = file.read_text()
        file.write_text(whole.replace("Name the unit.", "Name no unit at all."))
        told = reread(client, upstream, **changes)
        _, _, headers = await client.chat()
        async with client.get("/ready") as response:
            ready = response.status, (await response.json())["notes"]
        file.write_text(whole)
        reread(client, upstream, **changes)
        async with client.get("/ready") as response:
            assert (await response.json())["notes"] == []
    assert "route r: its library stays" in told
    assert ready[0] == 200 and "library stays" in ready[1][0]
    assert headers["x-tfgrpo-library"] != "empty"
    assert "Name the unit." in upstream.calls[0].body["messages"][0]["content"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"routes": {"r": {"upstreams": ["none"]}}}, "names the upstream 'none'"),
        ({"routes": {"r": {"budget": {"usd_total": 1}}}, "upstreams": {"a": {"price": None}}},
         "price"),
        ({"keys": {"k": {"hash": "scrypt:bad"}}}, "keys.k"),
    ],
)  # fmt: skip
async def test_settings_that_cannot_work_change_nothing(
    start: Start, changes: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        before = client.gateway.settings
        told = reread(client, upstream, **changes)
        assert said in told and said in caplog.text and "\n" not in told
        assert client.gateway.settings is before
        assert (await client.chat())[0] == 200

        def absent() -> GatewaySettings:
            raise ConfigError("no config file 'gateway.toml'")

        assert "no config file" in client.running.reload(absent)
        assert (await client.chat())[0] == 200


async def test_what_only_a_restart_changes_is_said(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        told = reread(client, upstream, serve={"listen": "127.0.0.1:9", "folder": "elsewhere"})
        assert "serve.folder changes with a restart" in told and "serve.listen" in told
        assert (await client.chat())[0] == 200


@pytest.mark.real
def test_hup_reads_the_file_anew(tmp_path: Path) -> None:
    with FaultServer() as upstream:
        file = Path(toml(tmp_path, upstream))
        with program(tmp_path, "--config", str(file)) as (process, url):
            assert ask(f"{url}/chat/completions", ASKED)[0] == 200
            good = file.read_text()
            file.write_text(good + '\n[routes.s]\nupstreams = ["nobody"]\n')
            process.send_signal(signal.SIGHUP)
            said(tmp_path, "stay as they were")
            assert ask(f"{url}/chat/completions", ASKED | {"model": "s"})[0] == 404
            file.write_text(good + '\n[routes.s]\nupstreams = ["a"]\n')
            process.send_signal(signal.SIGHUP)
            said(tmp_path, "read anew")
            assert ask(f"{url}/chat/completions", ASKED | {"model": "s"})[0] == 200
            assert ask(f"{url}/chat/completions", ASKED)[0] == 200


def said(folder: Path, words: str) -> None:
    """Wait until the program's log holds some words."""
    until = time.monotonic() + PATIENCE_S
    while words not in (folder / "log").read_text():
        assert time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.05)
