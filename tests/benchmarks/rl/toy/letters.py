"""Right first letters: a small world for which a random model of a few seconds' training is enough.

"b2x" asks for a reply whose first two tokens have ids that three divides; the letters mean nothing.
More tokens are harder, and what a reply says after them counts for nothing but its length. One
token in eight ends a reply, so that lengths have a long tail. Does not know training. Source: own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from tests.benchmarks.rl.toy.pieces import SPECIAL, Pieces
from tests.benchmarks.rl.toy.warm_start import ModelSize, model_of
from tfgrpo.messages import Message
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel
from tfgrpo.rl.model.decoder import decoder_from_hf
from tfgrpo.rollout import Rollout, Score, Task

FIRST, NOISE = "abc", "defghijklmnopqrstuvwxyz"
KNOWN = (*SPECIAL, "[user]", "[assistant]", "[system]", *map(chr, (10, *range(32, 127))))
ENDS = tuple(i for i in range(2, len(KNOWN), 8))


def start_model(size: ModelSize, device: str) -> tuple[LoadedModel, dict[str, float]]:
    """Return a model with drawn weights."""
    tokenizer = Pieces(KNOWN)
    model = model_of(size, len(tokenizer)).to(device)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    model = model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
    parts = LoadedModel(
        decoder=decoder_from_hf(model),
        tokenizer=tokenizer,
        save_extras=lambda folder: model.config.save_pretrained(folder),
        eos_ids=ENDS,
        name="letters",
    )
    return parts, {}


def tasks(n: int, seed: int, length: tuple[int, int], turns: bool = False) -> list[Task]:
    """Draw n different tasks of so many tokens."""
    low, high = length
    texts = [f"{a}{k}{x}" for a in FIRST for k in range(low, high + 1) for x in NOISE]
    random.Random(f"letters {seed}").shuffle(texts)
    return [_task(f"{seed}-{i}", text) for i, text in enumerate(texts[:n])]


def right_reply(text: str) -> str:
    """Return a reply that is right: as often as asked for, a letter whose id three divides."""
    letter = next(c for i, c in enumerate(KNOWN) if i % 3 == 0 and i not in ENDS and c.isalpha())
    return letter * int(text[1])


def _task(task_id: str, text: str) -> Task:
    n = int(text[1])
    metadata = {"strategies": list(FIRST), "hops": n - 1, "target": n + 1}
    return Task(task_id, text, reference=right_reply(text), metadata=metadata)


def wanted(text: str) -> list[int]:
    """Return the classes of a right reply's first tokens."""
    return [0] * int(text[1])


def share_right(text: str, ids: Sequence[int]) -> float:
    """Return the share of the tokens that are right before a wrong one."""
    classes, good = wanted(text), 0
    for want, token in zip(classes, ids, strict=False):
        if token % 3 != want:
            break
        good += 1
    return good / len(classes)


class Right:
    """Reward 1 where every token that is asked for is right, with parts."""

    verifier_id = "right-letters"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        """Every task will do."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Score a reply of one turn, or the first tokens of each turn."""
        steps = rollout.steps
        ids: Sequence[int] = steps[0].token_ids or ()
        if len(steps) > 1:
            ids = [(s.token_ids or (0,))[0] for s in steps]
        share = share_right(task.text, ids)
        parts = {"content": share, "structure": float(not rollout.is_truncated)}
        return Score(float(share == 1.0), parts=parts)


class Duels(Right):
    """The share of its group that a reply beats, by how much of it is right; with the verdicts."""

    async def score_group(self, rollouts: Sequence[Rollout], task: Task) -> list[Score]:
        """Return each reply's rate and what it gave against each."""
        right = [(await self.score(r, task)).parts["content"] for r in rollouts]
        beats = [[(1 + (a > b) - (a < b)) / 2 for b in right] for a in right]
        return [
            Score(sum(row) / len(row), parts={f"beats_{j}": x for j, x in enumerate(row)})
            for row in beats
        ]


class Room:
    """An environment: a turn a token. It says nothing of what is right."""

    def __init__(self, task: Task) -> None:
        self.text, self.turns = task.text, int(task.text[1])
        self.said: list[str] = []

    async def act(self, action: Message) -> list[Message] | None:
        """Take a turn; None after the last."""
        self.said.append(action.content[:1])
        return None if len(self.said) >= self.turns else [Message("user", ".")]

    def facts(self) -> dict[str, Any]:
        """States by what was said first in each turn."""
        ids = Pieces(KNOWN)("".join(self.said), add_special_tokens=False)["input_ids"]
        right = [share_right(self.text, ids[: i + 1]) * self.turns > i for i in range(self.turns)]
        return {
            "tool_calls": len(self.said),
            "invalid_actions": sum(not s for s in self.said),
            "state_keys": [f"{i}{''.join(map(str, right[:i]))}" for i in range(self.turns)],
            "step_rewards": [*(x / self.turns for x in right[: len(self.said)]), 0.0],
        }
