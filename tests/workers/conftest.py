"""One Ray cluster for all tests of this folder: a head without cores and two nodes of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
        ray = pytest.importorskip("ray")  # it reads its variables when it is imported
        from ray.cluster_utils import Cluster

        small = {"object_store_memory": 80 << 20, "include_dashboard": False}
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, **small},
        )
        for _ in range(2):
            cluster.add_node(num_cpus=1, **small)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
