"""A local Ray cluster of several raylets, for tests and benchmarks."""

from __future__ import annotations

import time
from typing import Any

SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False}
_TRIES = 4


def start_cluster(nodes: int, *, at_exit: bool = True) -> Any:
    """Return a cluster of a head without cores and nodes of one, with this process connected.

    Ray gives a node 30 s to start, which a busy machine may not manage: it is tried again.

    Args:
        nodes: how many beside the head.
        at_exit: end them with this process, whatever happens; then only the main thread adds more.
    """
    import ray
    from ray.cluster_utils import Cluster

    from tfgrpo.workers.ray_cluster import log_node_errors

    for left in reversed(range(_TRIES)):
        cluster = Cluster(shutdown_at_exit=at_exit)
        try:
            cluster.add_node(num_cpus=0, **SMALL)
            for _ in range(nodes):
                cluster.add_node(num_cpus=1, object_store_memory=SMALL["object_store_memory"])
            ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
            log_node_errors()
            return cluster
        except Exception:  # Ray raises nothing more special
            stop_cluster(cluster)
            if not left:
                raise
            time.sleep(5.0)
    raise AssertionError("unreachable")


def stop_cluster(cluster: Any) -> None:
    """End a cluster and this process's connection."""
    import ray

    ray.shutdown()
    if cluster.head_node is not None:
        cluster.shutdown()
