"""Replies that come together do not keep their next calls together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings
from tfgrpo.store import Journal, JournaledLM

WIDTH = 96


class Together:
    """An LM that answers as soon as so many calls are in flight, all of them in one turn."""

    model_id = "scripted:together"
    prefers_n = False

    def __init__(self, told: list[str], width: int = WIDTH) -> None:
        self.told, self.width = told, width
        self.sent = 0
        self.everybody = asyncio.Event()

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"backend": "together"}

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        self.told.append("sent")
        self.sent += 1
        mine = self.everybody
        if self.sent % self.width == 0:
            self.everybody = asyncio.Event()
            mine.set()
        await mine.wait()
        return [Completion("4", finish="stop")]

    async def aclose(self) -> None:
        return


class Told:
    """Judges everything as right and says when."""

    verifier_id = "told"
    reward_range = (0.0, 1.0)

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def check_task(self, task: Task) -> None:
        return

    async def score(self, rollout: Rollout, task: Task) -> Score:
        self.told.append("judged")
        return Score(1.0)


async def test_calls_go_out_while_replies_of_the_same_turn_are_still_judged(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    tasks = [Task(f"t{i}", f"What is 2 and {i}?", reference="4") for i in range(3 * WIDTH // 8)]
    store = Journal.open(tmp_path / "run", create=True)
    try:
        sampler = Sampler(
            ChatPolicy(JournaledLM(Together(told), store)),
            Told(told),
            SampleSettings(concurrency=WIDTH, probe=WIDTH),
            recorder=store,
        )
        groups = await sampler.groups(tasks, GroupSpec(group_size=8))
    finally:
        store.close()
    assert sum(len(g.graded) for g in groups) == 3 * WIDTH
    assert told.count("sent") == told.count("judged") == 3 * WIDTH
    places = [i for i, what in enumerate(told) if what == "sent"]
    for wave in (1, 2):
        first = places[wave * WIDTH]
        judged_before = told[:first].count("judged") - (wave - 1) * WIDTH
        assert judged_before < WIDTH / 2, f"wave {wave} waited for {judged_before} verdicts"
