"""A learning run's workers: its endpoint, their pool, and what a worker builds from the settings.

The run's process keeps journal, keys and decisions; workers make attempts and judge them. Does not
know the loop, or how workers are supervised. Source: own.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from tfgrpo.config.learn import Config
from tfgrpo.errors import ConfigError
from tfgrpo.execute import Executor, UnitSettings
from tfgrpo.learning.components import (
    RunComponents,
    configured_policy,
    configured_verifier,
    lm_name,
)
from tfgrpo.lm.local.loading import default_threads
from tfgrpo.protocols import LM, Policy, Verifier
from tfgrpo.runtime.import_string import module_folders
from tfgrpo.workers.endpoint import RunEndpoint
from tfgrpo.workers.pool import PoolExecutor, StartLink, WorkerPool
from tfgrpo.workers.processes import process_starter
from tfgrpo.workers.ray_cluster import RayCluster, RaySettings
from tfgrpo.workers.remote_lm import LmFacts
from tfgrpo.workers.token import FILE_VARIABLE, VARIABLE, worker_token
from tfgrpo.workers.work import WorkSpec

__all__ = ["RunWorkers", "build"]

BUILDER = "tfgrpo.learning.run_workers:build"
_SECTIONS = ("policy", "practice", "judge", "verifier")


def build(values: Mapping[str, Any], lm: Callable[[str], LM]) -> tuple[Policy, Verifier | None]:
    """Build policy and verifier in a worker, from the sections of the settings that it was sent."""
    config = Config.from_mapping(values["config"], "the settings that a worker was sent")

    def lm_of(role: Any) -> LM:
        return lm(lm_name(config, role))

    policy = configured_policy(config, lm_of, practice=values["practice"])
    return policy, configured_verifier(config, lm_of)


class RunWorkers:
    """The workers of one run, started with its first rollout that is not kept yet.

    Args:
        config: the resolved settings; `run.executor` is not `local`.
        roles: the run's LMs.

    Raises:
        ConfigError: settings that workers cannot serve.
    """

    def __init__(self, config: Config, roles: RunComponents) -> None:
        if not config.run.cache:
            raise ConfigError(
                f"run.executor {config.run.executor!r} needs run.cache: what a lost worker had "
                "asked for would be paid again without it"
            )
        self._config, self._roles = config, roles
        token = _token(config)
        self._endpoint = RunEndpoint(roles.lms, token)
        self._token = token
        self._cluster: RayCluster | None = None
        self._pool: WorkerPool | None = None

    async def start(self) -> None:
        """Open the run's endpoint; workers are started when they are needed."""
        settings = self._config.workers
        start: StartLink
        if self._config.run.executor == "processes":
            count = settings.count or default_threads()
            url = await self._endpoint.start()
            start = process_starter(url, self._token, settings.env)
        else:
            ray = RaySettings(settings.address, settings.cpus, settings.object_store_mb)
            cluster = self._cluster = RayCluster(
                ray, settings.count or default_threads(), self._token
            )
            url = await self._endpoint.start(settings.listen or "127.0.0.1:0")
            count = settings.count or (cluster.cores if settings.address else default_threads())
            start = cluster.starter(url)
        slots = math.ceil(self._config.run.concurrency / count)
        self._pool = WorkerPool(start, workers=count, slots=slots)

    def executor(
        self, policy: Policy, verifier: Verifier | None, settings: UnitSettings, *, practice: bool
    ) -> Executor:
        """Return where rollouts of the configured policy and verifier run.

        Args:
            policy: built from the same settings here; workers are held to its identity.
            verifier: as `policy`.
            settings: deadlines of units.
            practice: the policy draws as in practice.
        """
        assert self._pool is not None, "start comes first"
        values = self._config.model_dump(mode="json", include=set(_SECTIONS))
        spec = WorkSpec(
            builder=BUILDER,
            values={"config": values, "practice": practice},
            settings=settings,
            policy_id=policy.policy_id,
            verifier_id="" if verifier is None else verifier.verifier_id,
            lms={name: LmFacts.of(lm) for name, lm in self._roles.lms.items()},
            folders=module_folders(),
        )
        return PoolExecutor(self._pool, spec)

    async def aclose(self) -> None:
        """End the workers, then the endpoint."""
        if self._pool is not None:
            await self._pool.aclose()
        await self._endpoint.aclose()
        if self._cluster is not None:
            self._cluster.close()


def _token(config: Config) -> str:
    """The token of the endpoint: this machine's, else one made for the run where all workers are
    started from here.

    Raises:
        ConfigError: workers on a cluster would have none.
    """
    secret = worker_token() if config.run.executor == "ray" else None
    if secret is None and config.workers.address:
        raise ConfigError(
            f"workers on Ray at {config.workers.address} need a token with which they ask this run "
            f"for text: set {VARIABLE}, or {FILE_VARIABLE}, to the same here and on every node "
            "before `ray start` (python -c 'import secrets; print(secrets.token_urlsafe())')"
        )
    return secrets.token_urlsafe(24) if secret is None else secret.value
