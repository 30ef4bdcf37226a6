"""Training-Free GRPO, bare: groups of rollouts, their contrast, a gate, a proof. Offline, no key.

    python examples/tfgrpo_in_100_lines.py [SEED]

`tfgrpo.learn` does the same with a journal, budgets, retries and resume. The two models here are
scripted, so the example shows the method and proves nothing about language models: put
`open_lm("openai:MODEL")` in their place.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys

from tfgrpo import ChatPolicy, Library, RolloutGroup, Task, sample_group
from tfgrpo.experience import Critic, final_choice, gate_step, preset, prompt_context
from tfgrpo.protocols import Request
from tfgrpo.sampling import GroupSpec
from tfgrpo.statistics import Scores, paired_difference
from tfgrpo.tasks import split_tasks
from tfgrpo.testing import ScriptedLM
from tfgrpo.verifiers import Exact

MONTHS = "January February March April May June July August September October November December"


def make_task(number: int) -> Task:
    """Write a date in the house style, which nobody has told the model."""
    rng = random.Random(number)
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1950, 2049)
    prompt = f"Note {number}: {day} {MONTHS.split()[month - 1]} {year}. Which day is that?"
    return Task(f"note-{number}", prompt, reference=f"{year}-{month:02d}-{day:02d}")


def act(request: Request, seed: int | None) -> str:
    """Guess among three styles; a lesson that names the right one is mostly followed."""
    day, name, year = re.findall(r"(\d+) ([A-Z][a-z]+) (\d{4})", request.messages[-1].content)[-1]
    month = MONTHS.split().index(name) + 1
    right = f"{year}-{month:02d}-{int(day):02d}"
    known = any("year first" in m.content for m in request.messages if m.role == "system")
    if random.Random(f"{day}{name}{year}{seed}").random() < (0.9 if known else 0.25):
        return right
    return random.Random(seed).choice([f"{int(day):02d}.{month:02d}.{year}", f"{name} {day}"])


def compare(request: Request, seed: int | None) -> str:
    """Say what attempts with positive advantage have in common."""
    lesson = "Where a day is asked for, write the year first, then month and day as two digits each"
    wins = re.search(r"\b\d{4}-\d{2}-\d{2}\b", request.messages[-1].content)
    return json.dumps({"lessons": [{"lesson": lesson, "attempts": [1]}] if wins else []})


async def main(seed: int = 0) -> float:
    """Learn on 12 tasks, gate on 12, prove on 24; return the paired difference on the test."""
    splits = split_tasks([make_task(i) for i in range(48)], practice=12, gate=12, test=24)
    policy = ChatPolicy(ScriptedLM(act))
    critic = Critic(ScriptedLM(compare), preset("contrast"))

    async def groups(tasks: tuple[Task, ...], library: Library, stage: str) -> list[RolloutGroup]:
        """One group a task: eight rollouts under the same context, scored by the verifier."""
        context = prompt_context(library, critic.settings)
        draws = GroupSpec(group_size=8, seed=seed, stage=stage)
        jobs = (sample_group(t, policy, Exact(), context=context, draws=draws) for t in tasks)
        return list(await asyncio.gather(*jobs))

    async def scores(tasks: tuple[Task, ...], library: Library, stage: str) -> Scores:
        return {g.task.task_id: g.rewards_G for g in await groups(tasks, library, stage)}

    empty = current = Library()
    versions = {"empty": empty}
    on_gate = {"empty": await scores(splits.gate, empty, "gate")}
    for start in range(0, len(splits.practice), 6):
        batch = await groups(splits.practice[start : start + 6], current, "practice")
        proposal = await critic.propose(batch, current)  # only groups whose rewards differ teach
        print(f"step {start // 6 + 1}: {proposal.message}")
        if not proposal.has_change:
            continue
        key, now = proposal.library.version_id, current.version_id if len(current) else "empty"
        on_gate[key] = await scores(splits.gate, proposal.library, "gate")
        decision = gate_step(on_gate[now], on_gate[key], seed=seed)
        print(f"  gate: {'accepted' if decision.accepted else 'rejected'}, {decision.reason}")
        if decision.accepted:
            current = versions[key] = proposal.library
    chosen = final_choice({key: on_gate[key] for key in versions}, seed=seed)
    kept = empty if chosen.is_empty else versions[chosen.version_id]
    for entry in kept.shown:
        print(f"kept {entry.experience_id}: {entry.body}")
    before = await scores(splits.test, empty, "test")
    gain = paired_difference(before, await scores(splits.test, kept, "test"), seed=seed)
    print(f"test: {gain.estimate:+.2f} (95 % {gain.low:+.2f} to {gain.high:+.2f})")
    return gain.low


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
