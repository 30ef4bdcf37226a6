"""Groups to rows: measured numbers, facts, reshaped rewards, advantages, against hand-made ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rl.tiny import EvenTokens, random_rows, tiny_config, tiny_hf, tiny_parts, tiny_tasks
from tfgrpo.messages import Message
from tfgrpo.rl.formulas.credit import CREDIT, rows_of
from tfgrpo.rl.formulas.inputs import RewardBatch
from tfgrpo.rl.model.decoder import decoder_from_hf
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rl.update.between_passes import Gaps
from tfgrpo.rl.update.row_features import (
    collect,
    planning,
    state_keys,
    step_rewards,
    thinking_tokens,
)
from tfgrpo.rl.update.token_stats import measure_rows
from tfgrpo.rl.update.train_rows import RowMaker, graded_of
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task

LETTERS = "abcdefghijklmnopqrstuvwxyz </>"


def letters(ids: Any) -> str:
    return "".join(LETTERS[i] for i in ids)


def test_measured_numbers_are_those_of_the_softmax() -> None:
    model = tiny_hf(dtype=torch.float64)
    rows = random_rows(2, 2, seed=3)
    found = measure_rows(
        decoder_from_hf(model, share=False), rows, temperature=0.7, max_tokens=30, chunk=3
    )
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.suffix_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0].double() / 0.7
        logp = logits.log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
        picked = logp.gather(-1, torch.tensor(row.suffix_ids)[:, None]).squeeze(-1)
        wanted = {
            "logp": picked,
            "entropy": -(logp.exp() * logp).sum(-1),
            "sum_square": (logp.exp() ** 2).sum(-1),
            "mean_logp": logp.mean(-1),
        }
        for name, value in wanted.items():
            assert getattr(found, name)[row.index] == pytest.approx(value.tolist(), abs=1e-5), name


def rollout(n: int, reward: float, ids: tuple[int, ...], **metadata: Any) -> Rollout:
    step = Step(Message("assistant", letters(ids)), (), ids, (-1.0,) * len(ids), (5, 6))
    return Rollout(f"r{n}", "t", (step,), metadata=metadata).graded(Score(reward))


def group(*rollouts: Rollout, **metadata: Any) -> RolloutGroup:
    return RolloutGroup("g", Task("t", "x", metadata=metadata), rollouts)


def maker(folder: Path, **sections: Any) -> RowMaker:
    config = tiny_config(folder, **sections)
    return RowMaker(config, tiny_parts().decoder, letters)


def test_rewards_are_reshaped_in_order_before_the_advantage(tmp_path: Path) -> None:
    made = maker(
        tmp_path,
        rollout={"max_tokens": 4},
        rewards={
            "names": ["overlong_soft", "length_target"],
            "options": {"overlong_soft": {"buffer": 2.0}, "length_target": {"alpha": 0.1}},
        },
        features={"target_R": "task:wanted"},
        loss={"advantage": "dr_grpo"},
    )
    groups = [group(rollout(0, 1.0, (1,)), rollout(1, 1.0, (1, 2, 3)), wanted=2)]
    rows, stale = made.rows(groups, 0)
    # lengths 1 and 3 of at most 4 with a buffer of 2: no penalty and half of one
    shaped = [1.0 - 0.1, 1.0 - 0.5 - 0.1]
    assert [r.reward for r in rows] == pytest.approx(shaped)
    assert [r.advantage for r in rows] == pytest.approx([0.25, -0.25])
    assert stale == frozenset()


def test_options_that_follow_training_are_filled_in(tmp_path: Path) -> None:
    made = maker(
        tmp_path,
        verifier={"kind": "function"},
        optimiser={"steps": 4},
        rewards={
            "names": ["structure_to_content"],
            "options": {"structure_to_content": {"floor": 0.0}},
        },
    )
    scores = [
        Score(0.0, parts={"structure": 1.0, "content": 0.0}),
        Score(0.0, parts={"content": 1.0}),
    ]
    base = rollout(0, 0.0, (1,)), rollout(1, 0.0, (1,))
    groups = [group(*(r.graded(s) for r, s in zip(base, scores, strict=True)))]
    start, middle = (made.rows(groups, step)[0] for step in (0, 2))
    assert [r.reward for r in start] == pytest.approx([1.0, 0.0])
    assert [r.reward for r in middle] == pytest.approx([0.5, 0.5])


def walk(n: int, reward: float, seen: str) -> Rollout:
    """One token a step; the letters of `seen` were observed before each step but the first."""
    steps, prompt = [], (5, 6)
    for i in range(len(seen) + 1):
        answer = (Message("user", seen[i]),) if i < len(seen) else ()
        steps.append(Step(Message("assistant", "a"), answer, (n,), (-1.0,), prompt))
        prompt = (*prompt, n, *((20 + LETTERS.index(seen[i]),) if i < len(seen) else ()))
    return Rollout(f"w{n}", "t", tuple(steps)).graded(Score(reward))


def test_step_credit_sees_states_by_observation_or_by_history(tmp_path: Path) -> None:
    section = {"environment": "tests.rl.formulas.test_through_config:Room"}
    walks = [walk(0, 1.0, "ab"), walk(1, 0.0, "cb"), walk(2, 0.0, "ab")]
    wanted = RewardBatch(
        reward_R=np.array([1.0, 0.0, 0.0]),
        group_R=np.zeros(3, dtype=np.int64),
        length_R=np.array([3, 3, 3]),
        step_R=[np.arange(3)] * 3,
        state_keys_R=[("s", "a", "b"), ("s", "c", "b"), ("s", "a", "b")],
    )
    made = maker(tmp_path, multi_turn=section, credit={"name": "gigpo", "options": {"gamma": 0.5}})
    rows, _ = made.rows([group(*walks)], 0)
    expected = rows_of(wanted, CREDIT["gigpo"].fn(wanted, gamma=0.5))
    assert [r.advantage for r in rows] == [pytest.approx(e) for e in expected]
    # by history no two rollouts share a state after the first step: other tokens were sampled
    assert (
        len(
            set(state_keys(walks[0], by_history=False))
            & set(state_keys(walks[2], by_history=False))
        )
        == 3
    )
    first, third = (state_keys(w, by_history=True) for w in (walks[0], walks[2]))
    assert first[0] == third[0] and not set(first[1:]) & set(third[1:])


def test_an_environments_own_states_and_rewards_come_first() -> None:
    from dataclasses import replace

    plain = walk(0, 1.0, "ab")
    own = replace(plain, metadata={"state_keys": [1, 2, 3, 4], "step_rewards": [0.5, 0, 1]})
    assert state_keys(own, by_history=True) == ("1", "2", "3")
    assert step_rewards(own) == (0.5, 0.0, 1.0)
    told = plain.graded(Score(1.0, parts={"step_0": 0.1, "step_1": 0.2, "step_2": 0.3}))
    assert step_rewards(told) == (0.1, 0.2, 0.3)


def test_phases_and_phrases_are_found_in_tokens() -> None:
    ids = [LETTERS.index(c) for c in "ab</think>cd"]
    assert thinking_tokens(ids, letters) == 10
    assert thinking_tokens(ids[:4], letters) == 0
    text = [LETTERS.index(c) for c in "so we try it"]
    flags = planning(text, letters, ["we try"])
    # white space alone never counts, so the blank inside the phrase is covered by its neighbours
    marked = "".join(c for c, f in zip("so we try it", flags, strict=True) if f).replace(" ", "")
    assert marked == "wetry"
    assert planning(text, letters, []) == (0.0,) * len(text)


def test_the_greedy_baseline_is_the_greedy_rollouts_reward(tmp_path: Path) -> None:
    trainer = Trainer(
        tiny_config(tmp_path, loss={"advantage": "remax"}), tiny_parts(), tiny_tasks(), EvenTokens()
    )
    rolled = trainer._roller.roll(0)
    rows, _ = trainer._row_maker.rows(rolled.groups, 0, baselines=rolled.baselines)
    prompter = trainer._maker.prompter
    greedy = {}
    for g in rolled.groups:
        ids = list(prompter.ids(g.task))
        made: list[int] = []
        while len(made) < 8 and 2 not in made:
            with torch.no_grad():
                logits = tiny_hf()(torch.tensor([ids + made])).logits[0, -1]
            made.append(int(logits.argmax()))
        greedy[g.task.task_id] = sum(i % 2 == 0 for i in made) / len(made)
    expected = [
        r.reward - greedy[g.task.task_id] for g in rolled.groups for r in g.rollouts if r.score
    ]
    assert [r.advantage for r in rows] == pytest.approx(expected)


def test_ratio_and_score_norm_are_those_of_whole_rollouts(tmp_path: Path) -> None:
    trainer = Trainer(
        tiny_config(tmp_path, loss={"advantage": "vcpo"}), tiny_parts(), tiny_tasks(), EvenTokens()
    )
    groups = trainer._roller.roll(0).groups
    graded = graded_of(groups)
    facts = collect(graded, trainer._row_maker._sources(graded, {}))
    model = tiny_hf()
    for g, f in zip(graded, facts, strict=True):
        assert f.columns_R["ratio_R"] == pytest.approx(1.0, abs=1e-4)
        ids = torch.tensor([[*g.row.prompt_ids, *g.row.suffix_ids]])
        with torch.no_grad():
            pi = model(ids).logits[0].double().softmax(-1)[len(g.row.prompt_ids) - 1 : -1]
        one_hot = torch.nn.functional.one_hot(torch.tensor(g.row.suffix_ids), pi.shape[-1])
        norm = float((one_hot - pi).norm())
        assert f.columns_R["score_norm_R"] == pytest.approx(norm, rel=1e-4)


def test_a_loss_that_regresses_to_the_next_position_gets_its_gap(tmp_path: Path) -> None:
    """After an update, the gap is the change of the mean log-prob at the next position."""
    trainer = Trainer(
        tiny_config(tmp_path, loss={"name": "rover", "advantage": "dr_grpo"}),
        tiny_parts(),
        tiny_tasks(),
        EvenTokens(),
    )
    rows, _ = trainer._row_maker.rows(trainer._roller.roll(0).groups, 0)
    gaps = Gaps(trainer.updater.mean_logp, rows)
    at_start = gaps.added(rows)
    for row, changed in zip(rows, at_start, strict=True):
        assert changed.advantage == pytest.approx((row.advantage,) * row.row.n_loss, abs=1e-7)
    before = trainer.updater.mean_logp(rows)
    trainer.updater.update(rows, 0)
    after = trainer.updater.mean_logp(rows)
    moved = 0.0
    for row, changed in zip(rows, gaps.added(rows), strict=True):
        i = row.row.index
        gap = [a - b for a, b in zip(after[i], before[i], strict=True)]
        assert changed.advantage == pytest.approx([row.advantage + g for g in [*gap[1:], 0.0]])
        moved += math.fsum(map(abs, gap))
    assert moved > 0.01
