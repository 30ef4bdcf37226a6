"""`math`: two spellings of one number are equal."""

import asyncio

from tfgrpo import Task
from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, Step
from tfgrpo.verifiers import Math


async def main() -> None:
    task = Task("t", "Half of one?", reference="$\\frac{1}{2}$")
    scores = []
    verifier = Math(workers=1)
    for answer in ("\\boxed{0.5}", "\\boxed{0.4}"):
        rollout = Rollout("r", "t", (Step(Message("assistant", answer)),))
        scores.append((await verifier.score(rollout, task)).reward)
    assert scores == [1.0, 0.0], scores


asyncio.run(main())
