"""One Ray cluster for all tests of this folder: a head without cores and two nodes of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.cluster import start_cluster, stop_cluster

TOKEN = "a-token-of-this-run-only"
RAY_TOKEN = "a-token-of-the-cluster-itself-1234"


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running cluster that this process is connected to; its nodes can be killed."""
    home: Path = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", RAY_TOKEN)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("TFGRPO_WORKER_TOKEN", TOKEN)
        root = str(Path(__file__).parents[2])
        patch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
        pytest.importorskip("ray")  # it reads its variables when it is imported
        cluster = start_cluster(2)
        try:
            yield cluster
        finally:
            stop_cluster(cluster)
