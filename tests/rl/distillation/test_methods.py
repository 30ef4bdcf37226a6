"""NudgeRL and ICPO: their terms against brute force, and what they must reduce to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.rl.distillation.test_distiller import assert_same_gradients, gradients, logp
from tests.rl.tiny import EvenTokens, tiny_config, tiny_decoder, tiny_parts, tiny_tasks
from tfgrpo.context import Context, ContextPart
from tfgrpo.protocols import Sampling
from tfgrpo.rl.distillation.distiller import Distiller, DistillSettings
from tfgrpo.rl.distillation.fresh_groups import Drawn, FreshGroups, drawer
from tfgrpo.rl.distillation.icpo import (
    Icpo,
    IcpoSettings,
    accepted,
    accumulate_icpo,
    expert_bonus,
    shaped_ratio,
)
from tfgrpo.rl.distillation.nudgerl import NudgeRL, NudgeSettings, accumulate_nudge
from tfgrpo.rl.distillation.objectives import PassSettings
from tfgrpo.rl.formulas.advantages.group import grpo
from tfgrpo.rl.formulas.inputs import RewardBatch
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.rollouts.grading import Grader
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.single_turn import SingleTurnMaker
from tfgrpo.rl.update.accumulate import TrainRow, UpdateSettings, accumulate

PASSES = PassSettings()
STRATEGIES = (
    Context((ContextPart("lesson", "first way"),)),
    Context((ContextPart("lesson", "second way"),)),
)


def drawn() -> list[Drawn]:
    """Two tasks; contexts 0, 1 and none."""
    found = []
    for task, context, reward, suffix in (
        (0, 0, 1.0, (6, 7)),
        (0, 0, 0.0, (8, 2)),
        (0, 1, 1.0, (6, 2)),
        (0, -1, 0.0, (9, 9)),
        (1, 0, 0.0, (5, 2)),
        (1, -1, 1.0, (7, 7, 2)),
    ):
        bare = (20 + task, 21)
        told = bare if context < 0 else (30 + context, *bare)
        index = len(found)
        found.append(
            Drawn(Row(index, told, suffix), Row(index, bare, suffix), task, context, reward)
        )
    return found


def sum_logp(decoder, row: Row) -> torch.Tensor:
    targets = torch.tensor(row.suffix_ids)[:, None]
    return logp(decoder, row.prompt_ids, row.suffix_ids).gather(-1, targets).sum()


def test_nudge_adds_its_distillation_gradient_under_the_bare_prompt() -> None:
    """With and without the term: the difference is −c · mean(A · mean log π(y | bare x))."""
    decoder, rows = tiny_decoder(), drawn()
    decoder.requires_grad_(True)
    accumulate_nudge(decoder, rows, NudgeSettings(lam=0.3, distil=0.0), PASSES)
    policy = gradients(decoder)
    decoder.zero_grad()
    accumulate_nudge(decoder, rows, NudgeSettings(lam=0.3, distil=0.5), PASSES)
    both = gradients(decoder)
    decoder.zero_grad()
    # Task 0: mean ½; context 0 mean ½, context 1 mean 1. Task 1: context 0 mean 0, mean ½.
    raw = [np.array([0.5, -0.5, 0.15, -0.5]), np.array([-0.15, 0.5])]
    advantage = np.concatenate([(r - r.mean()) / (r.std() + 1e-4) for r in raw])
    term = torch.zeros(())
    for row, a in zip(rows, advantage, strict=True):
        term = term - 0.5 * float(a) * sum_logp(decoder, row.bare) / len(row.bare.suffix_ids)
    (term / len(rows)).backward()
    distil = gradients(decoder)
    assert_same_gradients({n: both[n] - policy[n] for n in both}, distil)
    decoder.zero_grad()
    tokens = sum(r.as_rolled.n_loss for r in rows)
    term = torch.zeros(())
    for row, a in zip(rows, advantage, strict=True):
        term = term - float(a) * sum_logp(decoder, row.as_rolled) / tokens
    term.backward()
    assert_same_gradients(policy, gradients(decoder))


def test_a_dropped_context_is_drawn_bare_and_no_rollout_is_lost() -> None:
    tasks = tiny_tasks(20)
    source = FreshGroups(
        lambda *_: [], tasks, lambda _: STRATEGIES, lambda _: (1,), tasks_per_step=20, seed=3
    )
    wanted = NudgeRL(source).wanted(0)
    total = dict.fromkeys(range(20), 0)
    for one in wanted:
        assert one.context.is_empty == (one.number == -1)
        assert one.number == -1 or one.context is STRATEGIES[one.number]
        assert one.n > 0 and one.task in tasks
        total[one.place] += one.n
    assert set(total.values()) == {8}
    bare = sum(one.n for one in wanted if one.number == -1)
    assert 0.1 < bare / 160 < 0.4  # a quarter is dropped
    whole = NudgeRL(source, NudgeSettings(dropout=0.0)).wanted(0)
    assert all(not one.context.is_empty and one.n == 4 for one in whole)


def test_icpo_draws_each_task_bare_and_with_its_first_examples() -> None:
    tasks = tiny_tasks(4)
    source = FreshGroups(lambda *_: [], tasks, lambda _: STRATEGIES, lambda _: (1,))
    wanted = Icpo(source, IcpoSettings(group_size=6, expert=2)).wanted(0)
    assert {(one.context.is_empty, one.number, one.n) for one in wanted} == {
        (True, -1, 4),
        (False, 0, 2),
    }
    assert all(one.context is STRATEGIES[0] for one in wanted if one.number == 0)
    none = Icpo(replace(source, contexts_of=lambda _: ()), IcpoSettings(group_size=6, expert=2))
    assert [(one.number, one.n) for one in none.wanted(0)] == [(-1, 6)] * 4


def test_icpo_without_expert_rollouts_is_grpo() -> None:
    rows = [d for d in drawn() if d.context < 0]
    rows = [*rows, Drawn(Row(9, (20, 21), (4, 2)), Row(9, (20, 21), (4, 2)), 0, -1, 1.0)]
    rows.sort(key=lambda d: d.task)
    decoder = tiny_decoder()
    decoder.requires_grad_(True)
    accumulate_icpo(decoder, rows, IcpoSettings(), PASSES, step=0)
    ours = gradients(decoder)
    decoder.zero_grad()
    batch = RewardBatch(
        reward_R=np.array([d.reward for d in rows]),
        group_R=np.array([d.task for d in rows]),
        length_R=np.array([d.as_rolled.n_loss for d in rows]),
    )
    train = [
        TrainRow(d.as_rolled, float(a), d.reward, d.task)
        for d, a in zip(rows, grpo(batch), strict=True)
    ]
    accumulate(decoder, train, UpdateSettings(loss="clip", aggregation="token_mean"))
    assert_same_gradients(ours, gradients(decoder))


def test_a_rejected_expert_rollout_leaves_the_group() -> None:
    rows = drawn()
    kept = accepted(rows, 1.0)
    assert [d.as_rolled.index for d in kept] == [0, 2, 3, 5]  # bare failures stay
    decoder = tiny_decoder()
    decoder.requires_grad_(True)
    first = accumulate_icpo(decoder, rows, IcpoSettings(), PASSES, step=5)
    ours = gradients(decoder)
    decoder.zero_grad()
    accumulate_icpo(decoder, kept, IcpoSettings(), PASSES, step=5)
    assert_same_gradients(ours, gradients(decoder))
    assert first["expert_kept"] == 2


def test_expert_rows_have_the_gradient_of_the_shaped_ratio_under_the_bare_prompt() -> None:
    """One group: an accepted expert rollout and a bare failure, bonus 0.5 at the first step."""
    rows = [drawn()[2], drawn()[3]]
    settings = IcpoSettings(bonus=0.5, gamma=0.2)
    decoder = tiny_decoder()
    decoder.requires_grad_(True)
    accumulate_icpo(decoder, rows, settings, PASSES, step=0)
    ours = gradients(decoder)
    decoder.zero_grad()
    rewards = np.array([1.5, 0.0])
    advantage = grpo(RewardBatch(rewards, np.array([0, 0]), np.array([2, 2])))
    expert, bare = rows
    targets = torch.tensor(expert.bare.suffix_ids)[:, None]
    new = logp(decoder, expert.bare.prompt_ids, expert.bare.suffix_ids).gather(-1, targets)
    old = logp(decoder, expert.as_rolled.prompt_ids, expert.bare.suffix_ids).gather(-1, targets)
    ratio = (new - old.detach()).exp()
    loss = -float(advantage[0]) * (ratio / (ratio + 0.2)).sum() / 4
    loss = loss - float(advantage[1]) * sum_logp(decoder, bare.bare) / 4
    loss.backward()
    assert_same_gradients(ours, gradients(decoder))


def test_the_bonus_is_gone_at_the_end_and_the_shaping_is_bounded() -> None:
    assert [expert_bonus(s, 5, 0.4) for s in (0, 2, 4, 9)] == pytest.approx([0.4, 0.2, 0.0, 0.0])
    shaped = shaped_ratio(torch.tensor([-50.0, 0.0, 50.0]), torch.zeros(3), 0.1)
    assert shaped.tolist() == pytest.approx([0.0, 1 / 1.1, 1.0], abs=1e-6)


def online(folder, kind):
    """An objective that draws from the tiny model with the even-token verifier."""
    parts, config = tiny_parts(), tiny_config(folder)
    prompts = Prompter(parts.tokenizer, context_tokens=128)
    generator = GroupGenerator(parts.decoder, eos_ids=parts.eos_ids, max_rows=16)
    sampling = Sampling(temperature=1.0, max_tokens=config.rollout.max_tokens)
    maker = SingleTurnMaker(generator, Grader(prompts, EvenTokens()), sampling, policy_id="tiny")
    source = FreshGroups(
        drawer(maker), tiny_tasks(), lambda _: STRATEGIES, prompts.ids, tasks_per_step=3
    )
    objective = kind(source)
    settings = DistillSettings(steps=4, lr=5e-3, save_every=2)
    return Distiller(parts, objective, settings, folder)


@pytest.mark.parametrize("kind", [NudgeRL, Icpo])
def test_drawing_objectives_train_and_resume_bit_by_bit(tmp_path, kind) -> None:
    from tests.rl.distillation.test_distiller import fingerprint

    whole = online(tmp_path / "whole", kind)
    seen: list[dict[str, float]] = []
    whole.run(lambda _, figures: seen.append(figures))
    assert all(f["tokens"] > 0 and f["grad_norm"] > 0 for f in seen)
    assert all({"reward_bare", "reward_context"} <= f.keys() for f in seen)
    cut = online(tmp_path / "cut", kind)
    cut.step(), cut.step()
    cut.save()
    again = online(tmp_path / "cut", kind)
    again.run()
    assert fingerprint(again) == fingerprint(whole)
