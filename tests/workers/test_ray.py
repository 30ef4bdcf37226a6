"""Ray itself: a node that dies in the middle, a whole run, no secret in its files, care with
clusters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.learning.test_run_workers import made
from tests.learning.worlds import World, comparable, settings
from tests.workers import worlds
from tests.workers.conftest import TOKEN
from tests.workers.contract import EVERYWHERE, ON_WORKERS, Counting, place
from tfgrpo.errors import ConfigError
from tfgrpo.lm.retry import RetryingLM
from tfgrpo.rollout import Task
from tfgrpo.runtime.redaction import Secret
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings
from tfgrpo.store import Journal, JournaledLM
from tfgrpo.workers import ray_cluster as connecting

pytestmark = pytest.mark.real
pytest.importorskip("aiohttp")

CANARY = "CANARY-provider-key-0123456789"


@pytest.mark.parametrize("check", [*EVERYWHERE, *ON_WORKERS], ids=lambda check: check.__name__)
async def test_the_suite_of_all_places(
    ray_cluster: Any, check: Callable[..., Any], tmp_path: Path
) -> None:
    await check("ray", tmp_path)


def test_a_run_on_ray_finds_and_pays_the_same(ray_cluster: Any, tmp_path: Path) -> None:
    here, there = World(), World()
    local = here.learn(settings(tmp_path / "a"))
    run = {"executor": "ray", "concurrency": 8, "folder": str(tmp_path / "b" / "run")}
    on_ray = there.learn(settings(tmp_path / "b", run=run, workers={"count": 2}))
    assert comparable(on_ray) == comparable(local)
    assert made(tmp_path / "b") == made(tmp_path / "a")
    assert set(there.draws.values()) == {1}


async def test_a_node_that_dies_costs_no_rollout_and_no_call(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_PROVIDER_KEY", CANARY)
    assert Secret.from_environment("MY_PROVIDER_KEY") is not None
    raw = Counting(0.2)
    extra = ray_cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    with Journal.open(tmp_path / "run", create=True) as store:
        lm = RetryingLM(JournaledLM(raw, store))
        async with place("ray", lm, workers=3, slots=4) as there:
            assert there.pool is not None
            sampler = Sampler(
                *worlds.build({}, lambda _: lm),
                SampleSettings(concurrency=12, probe=0),
                recorder=store,
                executor=there.executor(),
            )
            tasks = [Task(f"{n}", f"How many ones in {n}?", "1") for n in range(120)]
            work = asyncio.create_task(sampler.groups(tasks, GroupSpec(group_size=2)))
            while raw.answered.total() < 60 or len(there.pool.alive) < 3:
                assert not work.done()
                await asyncio.sleep(0.02)
            await asyncio.to_thread(ray_cluster.remove_node, extra, allow_graceful=False)
            groups = await work
            lost = there.pool.lost
    assert lost == 1
    assert [g.outcome_counts() for g in groups] == [{"graded": 2}] * 120
    assert set(raw.answered.values()) == {1} and raw.asked == raw.answered
    session = Path(ray_cluster.head_node.get_session_dir_path())
    assert _files_with(session, [CANARY, TOKEN]) == []


def _files_with(folder: Path, secrets: list[str]) -> list[Path]:
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            found += [path for secret in secrets if secret.encode() in data]
    return found


def test_a_cluster_with_a_token_is_taken_and_an_open_one_refused(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting._refuse_open_cluster(ray_cluster.address)
    connecting._refuse_open_cluster("127.0.0.1:1")  # nobody else reaches it: not even asked
    monkeypatch.setattr(connecting, "_PROBE", "pass")  # what an open cluster answers
    with pytest.raises(ConfigError, match="answers without a token"):
        connecting._refuse_open_cluster(ray_cluster.address)


def test_workers_elsewhere_need_a_token_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TFGRPO_WORKER_TOKEN", raising=False)
    run = {"executor": "ray", "folder": str(tmp_path / "run")}
    far = settings(tmp_path, run=run, workers={"address": "10.0.0.1:6379", "count": 1})
    with pytest.raises(ConfigError, match="TFGRPO_WORKER_TOKEN_FILE"):
        World().learn(far)
    monkeypatch.setenv("TFGRPO_WORKER_TOKEN", "short")
    with pytest.raises(ConfigError, match="under 16 characters"):
        World().learn(far)
    monkeypatch.delenv("TFGRPO_WORKER_TOKEN")
    monkeypatch.setenv("TFGRPO_WORKER_TOKEN_FILE", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="cannot be read"):
        World().learn(far)


def test_an_old_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "__version__", "2.40.1")
    cluster = connecting.RayCluster(connecting.RaySettings(), 1, TOKEN)
    with pytest.raises(ConfigError, match="too old"):
        cluster.connect()
    assert os.environ["RAY_AUTH_MODE"]


def test_what_ray_prints_of_lost_nodes_goes_to_the_log(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = pytest.importorskip("ray._private.worker")
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)  # put back later
    connecting.log_node_errors()
    lost = {"lines": ["The node has been marked dead"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(lost, ignore_prefix=False)
    assert capsys.readouterr().out == ""
    assert "marked dead" in caplog.text
