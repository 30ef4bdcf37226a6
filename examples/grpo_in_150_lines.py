"""GRPO, bare: groups from the weights that learn, advantages within a group, one update a step.

    python examples/grpo_in_150_lines.py [SEED [STEPS]]

The embedded model (SmolLM2-135M) learns to answer a small sum with the number alone, on the CPU, in
a few minutes. `tfgrpo train` does the same with checkpoints, resume, several GPUs, hints, other
losses and advantages, and figures of every step. Needs the extras `local` and `rl`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence

import numpy as np

from tfgrpo import Rollout, RolloutGroup, Task
from tfgrpo.messages import Message
from tfgrpo.protocols import Generated, Sampling
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel, load_parts
from tfgrpo.rl.formulas.advantages import ADVANTAGES
from tfgrpo.rl.formulas.inputs import RewardBatch
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.optim.adamw import AdamSettings, AdamW
from tfgrpo.rl.optim.master_weights import FullWeights
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.update.accumulate import TrainRow, UpdateSettings, accumulate
from tfgrpo.rollout import Step
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.statistics import Scores, paired_difference
from tfgrpo.verifiers import Numeric

GROUP, TASKS_A_STEP, MAX_TOKENS, LR = 8, 8, 12, 1e-5


def make_tasks() -> tuple[list[Task], list[Task]]:
    """Sums of two numbers below 20; those held out are never trained on."""
    pairs = [(a, b) for a in range(2, 20) for b in range(2, 20)]
    random.Random(0).shuffle(pairs)
    text = "What is {} + {}? Give only the number."
    tasks = [Task(f"{a}+{b}", text.format(a, b), reference=str(a + b)) for a, b in pairs]
    return tasks[:-32], tasks[-32:]


class Sampler:
    """Makes groups with the weights as they are at that moment."""

    def __init__(self, parts: LoadedModel) -> None:
        self.prompter = Prompter(parts.tokenizer, context_tokens=parts.decoder.shape.context)
        self.generator = GroupGenerator(parts.decoder, eos_ids=parts.eos_ids)

    async def groups(
        self, tasks: Sequence[Task], n: int, temperature: float, seed: int
    ) -> list[RolloutGroup]:
        """One group a task: n replies to one prompt, drawn in one batch, each with a reward."""
        prompts = [self.prompter.encode(task) for task in tasks]
        drawn = self.generator.generate(
            prompts,
            n,
            Sampling(temperature=temperature, max_tokens=MAX_TOKENS),
            [[derive_seed(seed, task.task_id, i) for i in range(n)] for task in tasks],
        )
        found = []
        for task, prompt, replies in zip(tasks, prompts, drawn, strict=True):
            rollouts = [
                await self.graded(task, prompt, reply, i) for i, reply in enumerate(replies)
            ]
            found.append(RolloutGroup(f"{task.task_id}-{seed}", task, tuple(rollouts)))
        return found

    async def graded(
        self, task: Task, prompt: tuple[int, ...], reply: Generated, i: int
    ) -> Rollout:
        """One reply as a rollout with the verifier's score."""
        step = Step(
            Message("assistant", self.prompter.text(reply.token_ids)),
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            prompt_token_ids=prompt,
        )
        attempt = Rollout(f"{task.task_id}-{i}", task.task_id, (step,), sample_index=i)
        return attempt.graded(await Numeric().score(attempt, task))


def rows_of(groups: Sequence[RolloutGroup]) -> list[TrainRow]:
    """Rollouts with advantages: how much better than its siblings each one is."""
    flat = [(g, rollout) for g, group in enumerate(groups) for rollout in group.graded]
    batch = RewardBatch(
        reward_R=np.array([r.reward for _, r in flat], dtype=np.float64),
        group_R=np.array([g for g, _ in flat]),
        length_R=np.array([len(r.steps[0].token_ids or ()) for _, r in flat]),
    )
    advantage_R = ADVANTAGES["grpo"].fn(batch)
    rows = []
    for i, ((g, rollout), advantage) in enumerate(zip(flat, advantage_R, strict=True)):
        step = rollout.steps[0]
        row = Row(i, step.prompt_token_ids or (), step.token_ids or ())
        rows.append(TrainRow(row, float(advantage), group=g))
    return rows


async def main(seed: int = 0, steps: int = 12) -> float:
    """Train, and return the paired difference of the share of right answers on held-out tasks."""
    practice, held_out = make_tasks()
    parts = load_parts("local:smollm2-135m", dtype="float32")
    sampler = Sampler(parts)
    optimiser = AdamW(FullWeights(parts.decoder.requires_grad_(True)), AdamSettings(lr=LR))
    settings = UpdateSettings(loss="clip", aggregation="token_mean", max_tokens=MAX_TOKENS)

    async def scores() -> Scores:
        return {g.task.task_id: g.rewards_G for g in await sampler.groups(held_out, 4, 1.0, 0)}

    before = await scores()
    for step in range(steps):
        tasks = random.Random(f"{seed}-{step}").sample(practice, TASKS_A_STEP)
        groups = await sampler.groups(tasks, GROUP, 1.0, derive_seed(seed, step))
        seen = accumulate(parts.decoder, rows_of(groups), settings)  # gradients; equal groups skip
        norm = optimiser.step(LR)
        rewards = [r for g in groups for r in g.rewards_G]
        mixed = sum(g.is_informative() for g in groups)
        print(
            f"step {step + 1}: reward {np.mean(rewards):.2f}, {mixed}/{len(groups)} groups mixed, "
            f"gradient norm {norm:.2f}, {seen.trained_tokens} tokens trained",
            flush=True,
        )
    gain = paired_difference(before, await scores(), seed=seed)
    print(f"held-out: {gain.estimate:+.2f} (95 % {gain.low:+.2f} to {gain.high:+.2f})")
    return gain.estimate


if __name__ == "__main__":
    numbers = [int(a) for a in sys.argv[1:]]
    asyncio.run(main(*numbers))
