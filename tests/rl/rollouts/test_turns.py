"""Rollouts of several turns keep their sampled ids, and only those bear a loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.rl.model.test_decoder import naive_logps
from tests.rl.tiny import tiny_hf
from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message
from tfgrpo.rl.model.decoder import decoder_from_hf
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.rollouts.turns import TurnLimits, TurnModel, play
from tfgrpo.rl.update.accumulate import score_rows
from tfgrpo.rl.update.rollout_rows import row_of, step_numbers
from tfgrpo.rollout import Task

TASK = Task("t", "go")


class Countdown:
    """Answers n turns, then ends."""

    def __init__(self, n: int) -> None:
        self.left = n

    async def act(self, action: Message):
        self.left -= 1
        return None if self.left < 0 else [Message("tool", f"{self.left} left")]


async def sample(ids, seed):
    return (10 + len(ids) % 5, 20 + seed % 3), (-0.5, -0.25), False


def turn_tokens(messages, last_ids):
    return [40 + len(m.content) for m in messages] + [50]


async def played(n: int = 2, **limits):
    return await play(
        TASK,
        (5, 6, 7),
        Countdown(n),
        TurnModel(sample, turn_tokens, str, TurnLimits(**limits)),
        seed=1,
        rollout_id="r",
    )


async def test_a_rollout_is_one_sequence_with_loss_on_sampled_tokens_only() -> None:
    row = row_of(await played(), index=3)
    assert row.prompt_ids == (5, 6, 7)
    assert row.suffix_ids == (13, 21, 46, 50, 12, 22, 46, 50, 11, 20)
    assert row.loss_positions == (0, 1, 4, 5, 8, 9)
    assert [row.suffix_ids[i] for i in row.loss_positions] == [13, 21, 12, 22, 11, 20]


async def test_each_loss_token_knows_its_step() -> None:
    assert step_numbers(await played()) == (0, 0, 1, 1, 2, 2)


async def test_scores_equal_a_token_by_token_reference_without_masks() -> None:
    model = tiny_hf(dtype=torch.float64)
    row = row_of(await played(), index=0)
    got = score_rows(decoder_from_hf(model, share=False), [row], temperature=1.0, max_tokens=99)[0]
    every = naive_logps(model, Row(0, row.prompt_ids, row.suffix_ids))
    assert got == pytest.approx([every[i].item() for i in row.loss_positions or ()], abs=1e-5)


async def test_limits_end_a_rollout_and_mark_it() -> None:
    cut = await played(9, max_turns=2)
    assert cut.is_truncated and len(cut.steps) == 2
    long = await played(9, max_tokens=8)
    assert long.is_truncated and len(long.steps) == 2
    assert not (await played(1)).is_truncated


async def test_text_tokenised_again_is_refused() -> None:
    rollout = await played()
    first, second, *rest = rollout.steps
    broken = replace(second, prompt_token_ids=(5, 6, 7, 99, 21, 46, 50))
    with pytest.raises(ConfigError, match="prompt of step 1 does not continue"):
        row_of(replace(rollout, steps=(first, broken, *rest)), index=0)


async def test_a_step_without_token_ids_is_refused() -> None:
    rollout = await played()
    bare = replace(rollout.steps[0], token_ids=None)
    with pytest.raises(ConfigError, match="has no token ids"):
        row_of(replace(rollout, steps=(bare,)), index=0)
