"""Both kinds of journal, and a PostgreSQL server for the one that needs it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.store.postgres_server import NO_SERVER, PostgresServer, programs

_NAMES = itertools.count()

Where = Callable[[str], str]
"""Gives the place of a run by its name: a folder, or an address."""


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server of this test run's own."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    if programs() is None:
        pytest.skip(NO_SERVER)
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def one_database(postgres: PostgresServer) -> str:
    """The address of a database that tests share; each has runs of its own."""
    return postgres.new_database()


@pytest.fixture
def on_server(one_database: str) -> Where:
    """Places on the server."""
    test = next(_NAMES)
    return lambda name: f"{one_database}#{name}-{test}"


@pytest.fixture(params=["file", "server"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    """Places of either kind."""
    if request.param == "server":
        return request.getfixturevalue("on_server")  # type: ignore[no-any-return]
    return lambda name: str(tmp_path / name)
