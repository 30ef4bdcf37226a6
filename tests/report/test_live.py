"""The live view: loopback only, behind its token, read-only, following the journal."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.report.made import made_run
from tfgrpo.errors import ConfigError
from tfgrpo.report.served import LiveServer, serve_live
from tfgrpo.report.view import load_view
from tfgrpo.store.journal import Journal

pytestmark = pytest.mark.real


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    view = made_run(tests=3, practice=2)
    with Journal.open(tmp_path / "run", create=True, config={"a": 1}) as store:
        for group in view.groups:
            store.record_group(group)
    return tmp_path / "run"


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    with serve_live(folder) as running:
        yield running


def ask(
    server: LiveServer, path: str, method: str = "GET", host: str = ""
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    headers = {"Host": host} if host else {}
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    body = reply.read().decode()
    connection.close()
    return reply.status, dict(reply.getheaders()), body


def path_of(server: LiveServer) -> str:
    return server.url.split(f":{server.port}")[1]


def test_the_page_is_served_under_its_token_and_never_cached(server: LiveServer) -> None:
    status, headers, body = ask(server, path_of(server))
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "data-version=" in body and "connect-src &#x27;self&#x27;" in body
    assert server.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("path", ["/", "/status", "/wrong/", "//", "/../", "/%2e%2e/"])
def test_nothing_is_told_without_the_token(server: LiveServer, path: str) -> None:
    status, _, body = ask(server, path)
    assert (status, body) == (404, "not found\n")


def test_no_other_path_exists_below_the_token(server: LiveServer) -> None:
    assert ask(server, path_of(server) + "run.db")[0] == 404
    assert ask(server, path_of(server) + "../run.db")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_is_read_only(server: LiveServer, method: str) -> None:
    assert ask(server, path_of(server), method)[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1:1"])
def test_a_rebound_name_is_refused(server: LiveServer, host: str) -> None:
    assert ask(server, path_of(server), host=host)[0] == 403


def test_the_version_changes_when_the_journal_grows(folder: Path) -> None:
    with serve_live(folder) as server:
        path = path_of(server)
        before = ask(server, path + "status")[2]
        assert ask(server, path + "status")[2] == before
        with Journal.open(folder) as store:
            store.record_decision("final", {"version_id": "empty", "reason": "nothing helped"})
        assert ask(server, path + "status")[2] != before
        assert "Kept: no library. nothing helped" in ask(server, path)[2]


def test_a_folder_without_a_journal_says_so_and_recovers(tmp_path: Path) -> None:
    with serve_live(tmp_path / "later") as server:
        status, _, body = ask(server, path_of(server))
        assert status == 503 and "no report yet" in body
        Journal.open(tmp_path / "later", create=True).close()
        assert ask(server, path_of(server))[0] == 200


def test_head_gives_no_body(server: LiveServer) -> None:
    status, headers, body = ask(server, path_of(server), "HEAD")
    assert (status, body) == (200, "")
    assert int(headers["Content-Length"]) > 10_000


def test_a_port_in_use_is_a_usage_error(server: LiveServer, folder: Path) -> None:
    with pytest.raises(ConfigError, match="choose another port"):
        serve_live(folder, server.port)


def test_the_view_of_a_journal_equals_what_was_recorded(tmp_path: Path) -> None:
    made = made_run(tests=3, practice=2)
    with Journal.open(tmp_path / "customer-messages", create=True, config=made.config) as store:
        for group in made.groups:
            store.record_group(group)
        for version, payload in made.libraries:
            store.record_library(version, payload)
        for decision in made.decisions:
            store.record_decision(decision.kind, decision.payload, decision.key)
    read = load_view(tmp_path / "customer-messages")
    assert read.groups == made.groups
    assert read.libraries == made.libraries
    assert sorted(read.decisions, key=str) == sorted(made.decisions, key=str)
    assert read.config == made.config
    assert (read.name, read.final_arm, read.final_library[0]) == (
        "customer-messages",
        "final",
        "v3",
    )
