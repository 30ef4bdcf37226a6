"""Workers on a Ray cluster: connecting with care, and actors as links of a pool.

Ray places workers and tells that one is gone; restarting is ours (`pool`), so every actor has no
restarts and no retries. A cluster that answers without a token is refused unless it is this machine
alone: whoever reaches it can run code there. What crosses is JSON without secrets.

Does not know units or supervision. Source: own, on Ray's public API.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfgrpo.errors import ConfigError, ExecutorError, MissingExtraError, boundary
from tfgrpo.runtime.event_loop import start_task
from tfgrpo.runtime.hosts import is_loopback
from tfgrpo.runtime.redaction import redact
from tfgrpo.workers.pool import Link, Message, StartLink
from tfgrpo.workers.ray_actor import RayWorker
from tfgrpo.workers.token import VARIABLE
from tfgrpo.workers.work import software

log = logging.getLogger(__name__)

__all__ = ["RayCluster", "RaySettings", "log_node_errors"]

OLDEST = (2, 59)
"""The first Ray whose own clusters want a token by themselves."""
_START_S = 180.0
_PROBE = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=10)
"""


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Which cluster, and what a worker takes of it."""

    address: str = ""
    """HOST:PORT of the cluster's head; empty starts one on this machine for the run."""
    cpus: float = 1.0
    """Cores of one worker."""
    object_store_mb: int = 200
    """Of a cluster that is started here."""


class RayCluster:
    """A connection to Ray, made once and closed with the run where it was made here.

    Args:
        settings: which cluster.
        workers: how many workers a cluster that is started here has room for.
        token: of the run's endpoint; workers of a cluster that is started here inherit it.
    """

    def __init__(self, settings: RaySettings, workers: int, token: str) -> None:
        self._settings, self._workers, self._token = settings, workers, token
        self._ray: Any = None
        self._is_ours = False

    def connect(self) -> Any:
        """Return the ray module, connected; blocks for some seconds the first time.

        Raises:
            MissingExtraError: Ray is not installed.
            ConfigError: it is too old, the address is wrong or refuses us, or wants no token.
        """
        if self._ray is not None:
            return self._ray
        was_loaded = "ray" in sys.modules
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as exc:
            raise MissingExtraError.of("ray", "run.executor 'ray'", "ray") from exc
        if (
            was_loaded
        ):  # it has read its variables already: let it read them again, as it does itself
            ray._raylet.Config.initialize("")
        version = tuple(int(part) for part in ray.__version__.split(".")[:2])
        if version < OLDEST:
            raise ConfigError(f"ray {ray.__version__} is too old: pip install 'ray>=2.59,<3'")
        if not ray.is_initialized():  # else the caller's own session is used
            self._init(ray)
            self._is_ours = True
        self._ray = ray
        return ray

    def _init(self, ray: Any) -> None:
        settings = self._settings
        options: dict[str, Any] = {
            "log_to_driver": False,
            "configure_logging": False,
            "logging_level": logging.ERROR,
        }
        if settings.address:
            _refuse_open_cluster(settings.address)
            options["address"] = settings.address
        else:
            os.environ[VARIABLE] = self._token  # its workers are children of this process
            options |= {
                "address": "local",
                "num_cpus": max(1, int(self._workers * settings.cpus)),
                "object_store_memory": settings.object_store_mb << 20,
                "include_dashboard": False,
            }
        where = settings.address or "a cluster of this machine"
        is_main = threading.current_thread() is threading.main_thread()
        on_term = signal.getsignal(signal.SIGTERM) if is_main else None
        hint = (
            f"Ray at {where} cannot be used; its token is read from RAY_AUTH_TOKEN, "
            "RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, and Ray and Python must have the cluster's "
            "versions"
        )
        try:
            with boundary(ConfigError, hint):
                ray.init(**options)
            log_node_errors()
        finally:
            if is_main:  # ray.init takes TERM for itself; stopping is the run's to handle
                signal.signal(signal.SIGTERM, on_term)

    @property
    def cores(self) -> int:
        """Workers that the cluster has room for now."""
        total = self.connect().cluster_resources().get("CPU", 0.0)
        return max(1, int(total / self._settings.cpus))

    def starter(self, endpoint: str) -> StartLink:
        """Return what starts a worker on the cluster.

        Args:
            endpoint: URL of the run's endpoint, as the nodes reach it.
        """

        async def start(take: Callable[[Message], None], lost: Callable[[str], None]) -> Link:
            link = RayLink(self.connect(), take, lost)
            await link.start(endpoint, self._settings.cpus)
            return link

        return start

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._is_ours and self._ray is not None:
            self._ray.shutdown()
        self._ray, self._is_ours = None, False


def log_node_errors() -> None:
    """Send what Ray prints of lost nodes to the log.

    Ray writes it to standard output whatever `log_to_driver` says; there stands a command's result.
    """
    from ray._private import worker

    def to_log(data: dict[str, Any], ignore_prefix: bool) -> None:
        log.warning("Ray: %s", redact(" ".join(map(str, data.get("lines", [])))))

    worker.print_to_stdstream = to_log


def _refuse_open_cluster(address: str) -> None:
    """Refuse a cluster that anybody who reaches it can use.

    Raises:
        ConfigError: it is not of this machine, and answers a client without a token.
    """
    host = address.rpartition(":")[0].strip("[]")
    if is_loopback(host):
        return
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH_TOKEN")}
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, address],
        env=environment | {"RAY_AUTH_MODE": "disabled", "HOME": "/nonexistent"},
        capture_output=True,
        timeout=_START_S,
        check=False,
    )
    if probe.returncode == 0:
        raise ConfigError(
            f"the Ray cluster at {address} answers without a token, so anybody who reaches it can "
            "run code on it and read this run: start it with RAY_AUTH_MODE=token"
        )


class RayLink:
    """One actor; a `Link`."""

    def __init__(
        self, ray: Any, take: Callable[[Message], None], lost: Callable[[str], None]
    ) -> None:
        self._ray, self._take, self._lost = ray, take, lost
        self._actor: Any = None
        self._place = "not placed yet"
        self._outgoing: list[Message] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_gone = False

    @property
    def name(self) -> str:
        """Process and node of the worker."""
        return f"Ray worker ({self._place})"

    async def start(self, endpoint: str, cpus: float) -> None:
        """Start the actor and wait until it works.

        Raises:
            ExecutorError: it found no room in time, died, or cannot work.
        """
        options = {
            "num_cpus": cpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
        }
        self._actor = self._ray.remote(RayWorker).options(**options).remote(endpoint)
        try:
            async with asyncio.timeout(_START_S):
                hello = json.loads(await self._actor.hello.remote())
        except TimeoutError:
            await self.kill()
            raise ExecutorError(
                f"the cluster gave no {cpus:g} cores for a worker within {_START_S:.0f} s"
            ) from None
        except self._ray.exceptions.RayError as exc:
            await self.kill()
            raise ExecutorError(f"a Ray worker did not start: {_said(exc)}") from exc
        except BaseException:
            await self.kill()
            raise
        self._place = hello["place"]
        if hello.get("ready") != software():
            await self.kill()
            why = hello.get("error") or f"it runs {hello.get('ready')}, the run {software()}"
            raise ExecutorError(f"{self.name} cannot work: {why}")
        start_task(self._read(), self._tasks)

    async def _read(self) -> None:
        """Hand over what the worker finishes, until it is gone."""
        why = "its stream of results ended"
        try:
            async for reference in self._actor.events.remote():
                for message in json.loads(await reference):
                    self._take(message)
        except self._ray.exceptions.RayError as exc:
            why = _said(exc)
        await self._end(why)

    async def _end(self, why: str) -> None:
        if self._is_gone:
            return
        self._is_gone = True
        self._kill_actor()  # one that is only unavailable may live on
        self._lost(why)

    def send(self, messages: list[Message]) -> None:
        """Hand messages over; those of one turn of the loop go as one block."""
        if self._is_gone:
            return
        if not self._outgoing:
            start_task(self._send_block(), self._tasks)
        self._outgoing += messages

    async def _send_block(self) -> None:
        await asyncio.sleep(0)
        block, self._outgoing = self._outgoing, []
        try:
            await self._actor.take.remote(json.dumps(block).encode("ascii"))
        except self._ray.exceptions.RayError as exc:
            await self._end(_said(exc))

    async def kill(self) -> None:
        """Kill the actor, wherever it is."""
        self._is_gone = True
        self._kill_actor()
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _kill_actor(self) -> None:
        if self._actor is not None and self._ray.is_initialized():
            self._ray.kill(self._actor, no_restart=True)


def _said(error: BaseException) -> str:
    """Return an error of Ray in one short line: its first one, with its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return redact(f"{type(error).__name__}: {' '.join(lines)[:300]}")
