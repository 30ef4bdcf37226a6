"""`ray`: rollouts run on a worker of a Ray cluster, their calls through the run's endpoint."""

import asyncio

from tfgrpo import GroupSpec, Task
from tfgrpo.config.learn import Config
from tfgrpo.learning.components import RunComponents
from tfgrpo.learning.learn import Overrides, make_sampler, open_run, run_workers
from tfgrpo.learning.progress import QuietView


async def main() -> None:
    config = Config.from_mapping(
        {
            "run": {"folder": "run", "executor": "ray"},
            "workers": {"count": 1},
            "policy": {"lm": "scripted:echo"},
            "verifier": {"kind": "exact"},
        }
    )
    with open_run(config) as store:
        roles = RunComponents(config, store)
        async with run_workers(config, roles) as workers:
            sampler = make_sampler(config, roles, Overrides(), store, QuietView(), workers=workers)
            (group,) = await sampler.groups([Task("t", "hello", "hello")], GroupSpec(group_size=2))
    assert group.rewards_G == (1.0, 1.0), group.rollouts
    assert store.ledger.spent["calls"] == 2, store.ledger.spent


asyncio.run(main())
