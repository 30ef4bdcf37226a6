"""The arena: seeded brackets, verdicts in both orders, and a group's rounds as a part."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tests.verifiers.rows import said, task
from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.protocols import GroupVerifier, Request
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.sampling import judge_group
from tfgrpo.verifiers import Arena, WinRate, make_verifier
from tfgrpo.verifiers.arena import tournament


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 11])
async def test_a_tournament_finds_the_best_in_one_comparison_less_than_its_size(
    size: int,
) -> None:
    draw = np.random.default_rng(size)
    true, quick = draw.permutation(size), draw.normal(size=size)
    calls: list[tuple[int, int]] = []

    async def better(i: int, j: int) -> bool:
        calls.append((i, j))
        assert quick[i] > quick[j]
        return bool(true[i] > true[j])

    reached = await tournament(quick.tolist(), better)
    assert len(calls) == size - 1
    assert int(np.argmax(reached)) == int(np.argmax(true))


async def test_a_tournament_lets_the_two_strongest_seeds_meet_last() -> None:
    strength = [0.5, 0.9, 0.1, 0.8, 0.3, 0.2, 0.4, 0.05]
    pairs: list[set[int]] = []

    async def better(i: int, j: int) -> bool:
        pairs.append({i, j})
        return strength[i] > strength[j]

    assert await tournament(strength, better) == [1, 3, 0, 2, 0, 0, 1, 0]
    assert pairs[-1] == {1, 3}


class Longest(EvenTokens):
    """A quick score that says nothing: every answer is worth one half."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        return Score(0.5, parts={"quick": 0.5})


def bigger_number(request: Request, seed: int) -> str:
    """A judge for whom the larger number is better, whichever side it stands on."""
    text = request.messages[0].content
    first, second = (int(x) for x in re.findall(r"Answer [AB]:\n<<<\w+>>>\n(\d+)\n", text))
    return f"Plain.\nBetter: {'A' if first > second else 'B'}"


def answers(*texts: str) -> list[Rollout]:
    return [replace(said(text), rollout_id=f"r{i}", sample_index=i) for i, text in enumerate(texts)]


async def test_eight_answers_take_seven_matches_in_both_orders_and_the_best_wins() -> None:
    lm = ScriptedLM(bigger_number)
    arena = Arena(Longest(), lm, "The larger number.")
    assert isinstance(arena, GroupVerifier)
    made = await judge_group(answers(*"31415926"), task(None), arena)
    assert len(lm.requests) == 14
    rounds = [r.score.parts["round"] for r in made if r.score]
    assert rounds[5] == 3.0 == max(rounds) and sorted(rounds) == [0, 0, 0, 0, 1, 1, 2, 3]
    assert all(r.score and r.score.reward == 0.5 and r.score.parts["quick"] for r in made)


@pytest.mark.parametrize("reply", ["Better: A", "Better: B", "both are fine", ""])
async def test_a_judge_that_favours_a_side_or_says_nothing_leaves_it_to_the_seed(
    reply: str,
) -> None:
    class Ranked(Longest):
        async def score(self, rollout: Rollout, task: Task) -> Score:
            return Score(float(rollout.answer))

    arena = Arena(Ranked(), ScriptedLM(lambda request, seed: reply), "Any.")
    made = await arena.score_group(answers("0.2", "0.9", "0.4", "0.1"), task(None))
    assert [s.parts["round"] for s in made] == [0.0, 2.0, 1.0, 0.0]


async def test_a_group_that_cannot_be_judged_fails_as_one_and_a_cut_reply_stays_out() -> None:
    def lost(request: Request, seed: int) -> str:
        raise ProviderError("no", kind="auth")

    broken = Arena(Longest(), ScriptedLM(lost), "Any.")
    made = await judge_group(answers("1", "2"), task(None), broken, raises_fatal=False)
    assert [r.outcome for r in made] == ["verifier_failed"] * 2
    with pytest.raises(ProviderError):
        await judge_group(answers("1", "2"), task(None), broken)
    cut = [replace(said("7"), rollout_id="cut", is_truncated=True), *answers("1", "2")]
    arena = Arena(Longest(), ScriptedLM(bigger_number), "Any.")
    made = await judge_group(cut, task(None), arena, on_truncated="exclude")
    assert [r.outcome for r in made] == ["truncated", "graded", "graded"]
    assert [r.score.parts["round"] for r in made[1:] if r.score] == [0.0, 1.0]
    alone = await arena.score(answers("5")[0], task(None))
    assert alone.parts["round"] == 0.0


def test_an_arena_is_made_from_settings() -> None:
    def open_lm(spec: str = "", **options: Any) -> ScriptedLM:
        return ScriptedLM(bigger_number)

    settings = {"kind": "arena", "base": {"kind": "exact"}, "rubric": "Best.", "lm": "any:lm"}
    assert make_verifier(settings, open_lm=open_lm).reward_range == (0.0, 1.0)
    with pytest.raises(ConfigError, match="name the verifier that seeds it"):
        make_verifier({"kind": "arena", "rubric": "x", "lm": "any:lm"}, open_lm=open_lm)
    with pytest.raises(ConfigError, match="did you mean 'rubric'"):
        make_verifier({**settings, "rubrik": "x"}, open_lm=open_lm)


def test_training_ranks_a_group_by_the_rounds_of_its_tournament(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        verifier={"kind": "arena"},
        loss={"advantage": "arena_rank"},
    )

    def first_letters(request: Request, seed: int) -> str:
        first, second = re.findall(
            r"Answer [AB]:\n<<<\w+>>>\n(.*?)\n<<<end", request.messages[0].content, re.DOTALL
        )
        return f"Better: {'A' if first >= second else 'B'}"

    arena = Arena(Longest(), ScriptedLM(first_letters), "The later in the alphabet.")
    trainer = Trainer(config, tiny_parts(), tiny_tasks(), arena)
    groups = trainer._roller.roll(0).groups
    rows, _ = trainer._row_maker.rows(groups, 0)
    for group in range(len(groups)):
        advantages = [r.advantage for r in rows if r.group == group]
        assert max(advantages) == 1.0 and sum(advantages) == pytest.approx(0.0)
    assert trainer.step().figures["grad_norm"] > 0


async def test_win_rates_of_a_group_sum_to_half_its_size_and_follow_the_judge() -> None:
    lm = ScriptedLM(bigger_number)
    rates = WinRate(lm, "The larger number.")
    made = await judge_group(answers(*"3915"), task(None), rates)
    found = [r.reward for r in made]
    # beaten siblings 1, 3, 0, 2, and a tie with itself, of four
    assert found == [0.375, 0.875, 0.125, 0.625] and sum(found) == 2.0
    assert len(lm.requests) == 4 * 3
    assert (await rates.score(said("7"), task(None))).reward == 0.5


async def test_verdicts_of_pairs_are_kept_where_asked_for() -> None:
    lm = ScriptedLM(bigger_number)
    made = await WinRate(lm, "Larger.", verdicts=True).score_group(answers(*"3351"), task(None))
    assert [dict(s.parts) for s in made] == [
        {"place": 0.0, "beats_0": 0.5, "beats_1": 0.5, "beats_2": 0.0, "beats_3": 1.0},
        {"place": 1.0, "beats_0": 0.5, "beats_1": 0.5, "beats_2": 0.0, "beats_3": 1.0},
        {"place": 2.0, "beats_0": 1.0, "beats_1": 1.0, "beats_2": 0.5, "beats_3": 1.0},
        {"place": 3.0, "beats_0": 0.0, "beats_1": 0.0, "beats_2": 0.0, "beats_3": 0.5},
    ]
    assert [s.reward for s in made] == [0.5, 0.5, 0.875, 0.125]
    plain = WinRate(lm, "Larger.")
    assert not any(s.parts for s in await plain.score_group(answers(*"33"), task(None)))
    assert plain.verifier_id != WinRate(lm, "Larger.", verdicts=True).verifier_id


def test_training_regresses_log_ratios_to_what_a_judge_says_of_pairs(tmp_path: Path) -> None:
    """SPPO's target: the rate less one half, which is what `dr_grpo` makes of rates."""

    def longer(request: Request, seed: int) -> str:
        first, second = re.findall(
            r"Answer [AB]:\n<<<\w+>>>\n(.*?)\n<<<end", request.messages[0].content, re.DOTALL
        )
        return f"Better: {'A' if first >= second else 'B'}"

    config = tiny_config(
        tmp_path,
        verifier={"kind": "win_rate"},
        loss={"name": "sppo_square", "advantage": "dr_grpo", "options": {"eta": 10.0}},
        optimiser={"epochs_per_batch": 2},
    )
    verifier = WinRate(ScriptedLM(longer), "The later in the alphabet.")
    trainer = Trainer(config, tiny_parts(), tiny_tasks(), verifier)
    groups = trainer._roller.roll(0).groups
    rows, _ = trainer._row_maker.rows(groups, 0)
    for number, group in enumerate(groups):
        mine = [r for r in rows if r.group == number]
        assert [r.advantage for r in mine] == pytest.approx([x - 0.5 for x in group.rewards_G])
        assert sum(group.rewards_G) == pytest.approx(len(mine) / 2)
    assert trainer.step().figures["grad_norm"] > 0


async def test_a_judge_that_always_favours_a_side_makes_ties() -> None:
    rates = WinRate(ScriptedLM(lambda request, seed: "Better: A"), "Anything.")
    assert [s.reward for s in await rates.score_group(answers("1", "2", "3"), task(None))] == [
        0.5
    ] * 3
    silent = WinRate(ScriptedLM(lambda request, seed: "hm"), "Anything.")
    found = await silent.score_group(answers("1", "2"), task(None))
    assert [s.reward for s in found] == [0.5] * 2


def test_win_rates_are_made_from_settings() -> None:
    made = make_verifier(
        {"kind": "win_rate", "rubric": "Short."},
        open_lm=lambda **options: ScriptedLM(bigger_number),
    )
    assert isinstance(made, WinRate) and isinstance(made, GroupVerifier)
    settings = {"kind": "win_rate", "rubric": "Short.", "verdicts": "yes"}
    with pytest.raises(ConfigError, match="verdicts is 'yes'; give true or false"):
        make_verifier(settings, open_lm=lambda **options: ScriptedLM(bigger_number))
    with pytest.raises(ConfigError, match="rubric"):
        make_verifier({"kind": "win_rate"}, open_lm=lambda **options: ScriptedLM(bigger_number))
