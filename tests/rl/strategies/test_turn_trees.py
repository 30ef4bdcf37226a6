"""Rollouts of several turns that branch after a tool's answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.rl.rollouts.test_multi_turn import END, ChatTokenizer, Says
from tests.rl.rollouts.test_second_tries import Voice
from tests.rl.test_trainer import comparable, fingerprint
from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.hint_plan import PlannedGroup
from tfgrpo.messages import Message
from tfgrpo.policies.tools import tool
from tfgrpo.protocols import Sampling
from tfgrpo.rl.rollouts.multi_turn import Judging, MultiTurnMaker, TurnSetup
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.turn_tools import TurnText, TurnTools
from tfgrpo.rl.rollouts.turns import TurnLimits
from tfgrpo.rl.strategies.turn_trees import Arpo, TurnTree, branch_chance, uncertainty
from tfgrpo.rl.strategy_options import ArpoOptions, TurnTreeOptions
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rl.update.rollout_rows import row_of
from tfgrpo.rl.update.row_features import state_keys
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task

TASK = Task("t", "2 + 3?", reference="5")
CALLS: list[int] = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    CALLS.append(a + b)
    return a + b


def step(logps: Sequence[float], answer: str = "") -> Step:
    seen = (Message("user", answer),) if answer else ()
    return Step(Message("assistant", "a"), seen, (3,) * len(logps), tuple(logps), (1,))


def test_the_chance_of_a_branch_follows_its_formula() -> None:
    """2,000 rollouts whose second turn is more uncertain by 0.6: chance 0.3 + 0.4 · 0.6 = 0.54."""
    vocabulary = 100
    first, second = [-0.1 * math.log(vocabulary)] * 3, [-0.7 * math.log(vocabulary)] * 3
    assert uncertainty(step(second), 20, vocabulary) == pytest.approx(0.7)
    options = ArpoOptions(first=2000, beam=1, p=0.3, w=0.4)
    assert branch_chance(options, 0.1, 0.7) == pytest.approx(0.54)
    arpo = Arpo(options, vocabulary, seed=3)
    (plan,) = arpo.start(TASK, 4000)
    steps = (step(first, "5"), step(second))
    rollouts = tuple(
        Rollout(f"r{i}", "t", steps, sample_index=i).graded(Score(0.0)) for i in range(2000)
    )
    made = [PlannedGroup(plan, RolloutGroup("g", TASK, rollouts))]
    n = len(arpo.after(TASK, made))
    assert abs(n / 2000 - 0.54) < 3 * math.sqrt(0.54 * 0.46 / 2000)
    flat = Arpo(ArpoOptions(first=2000, beam=1, p=0.3, w=0.0), vocabulary, seed=3)
    flat.start(TASK, 4000)
    assert len(flat.after(TASK, made)) < n  # more uncertain, more branches


def player(say: Any) -> tuple[MultiTurnMaker, Voice]:
    voice, tokenizer = Voice(say), ChatTokenizer()
    tools = {"add": tool(add)}
    made = MultiTurnMaker(
        voice,
        Prompter(tokenizer, context_tokens=5000),
        Judging(Says()),
        Sampling(max_tokens=200),
        TurnSetup(
            lambda task: TurnTools(tools, timeout_s=5.0, max_chars=100),
            TurnText(tokenizer, template="chat", eos_ids=(2,)),
            TurnLimits(max_turns=4, max_tokens=5000),
            recalls=True,
        ),
        policy_id="p",
    )
    return made, voice


def calls_twice(prompt: str, number: int) -> str:
    turn = prompt.count("[assistant]") - 1
    if turn < 2:
        return f'Action: add {{"a": {turn}, "b": {number}}}' + END
    return f"It is {number}." + END


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_a_group_has_exactly_its_size_and_branches_share_their_beginning(size: int) -> None:
    for scheduler in (
        Arpo(ArpoOptions(first=2, p=0.7), 100, seed=1),
        TurnTree(TurnTreeOptions(first=2, factor=3, depth=3)),
    ):
        made, _ = player(calls_twice)
        (group,) = made.make([TASK], size, seed=1, hints=scheduler)
        assert len(group.rollouts) == size
        assert [r.sample_index for r in group.rollouts] == list(range(size))
        branches = [r for r in group.rollouts if "recalled_turns" in r.metadata]
        assert bool(branches) == (size > 2)
        for branch in branches:
            k = branch.metadata["recalled_turns"]
            parents = [
                r for r in group.rollouts if r is not branch and r.steps[:k] == branch.steps[:k]
            ]
            assert parents and 1 <= k < 3
            row_of(branch, index=0)  # one growing sequence


def test_a_branch_makes_no_call_before_its_fork() -> None:
    CALLS.clear()
    made, _ = player(calls_twice)
    tree = TurnTree(TurnTreeOptions(first=2, factor=4, depth=3))
    (group,) = made.make([TASK], 8, seed=1, hints=tree)
    whole = sum(len(r.steps) - 1 for r in group.rollouts)
    recalled = sum(r.metadata.get("recalled_turns", 0) for r in group.rollouts)
    assert len(CALLS) == whole - recalled and recalled >= 6
    CALLS.clear()
    plain, _ = player(calls_twice)
    plain.make([TASK], 8, seed=1)
    assert len(CALLS) == 16 > whole - recalled  # every rollout alone calls twice


def test_answers_bear_no_loss_in_a_branch() -> None:
    made, _ = player(calls_twice)
    (group,) = made.make(
        [TASK], 6, seed=1, hints=TurnTree(TurnTreeOptions(first=2, factor=3, depth=3))
    )
    for rollout in group.rollouts:
        row = row_of(rollout, index=0)
        sampled = [row.suffix_ids[i] for i in row.loss_positions or ()]
        assert sampled == [t for s in rollout.steps for t in s.token_ids or ()]
        assert row.n_loss < len(row.suffix_ids)


def test_equal_nodes_have_equal_keys_and_values() -> None:
    made, _ = player(calls_twice)
    tree = TurnTree(TurnTreeOptions(first=2, factor=3, depth=3))
    (group,) = made.make([TASK], 6, seed=1, hints=tree)
    keys = [state_keys(r, by_history=True) for r in group.rollouts]
    for (a, x), (b, y) in itertools.combinations(zip(group.rollouts, keys, strict=True), 2):
        shared = next(
            (i for i, (s, t) in enumerate(zip(a.steps, b.steps)) if s.token_ids != t.token_ids),
            min(len(a.steps), len(b.steps)),
        )
        assert x[: shared + 1] == y[: shared + 1]
        assert not set(x[shared + 1 :]) & set(y[shared + 1 :])


class Loud:
    """Says the parity of what was said, three times."""

    def __init__(self, task: Task) -> None:
        self.turns = 0

    async def act(self, action: Message) -> list[Message] | None:
        self.turns += 1
        if self.turns == 3:
            return None
        return [Message("user", f"p{sum(map(ord, action.content)) % 2}")]


@pytest.mark.parametrize("name", ["arpo", "turn_tree"])
def test_a_tree_of_turns_trains_and_a_stopped_run_goes_on_bit_equal(
    name: str, tmp_path: Path
) -> None:
    def trainer_of(folder: str) -> Trainer:
        config = tiny_config(
            tmp_path / folder,
            rollout={
                "strategy": name,
                "strategy_options": {"first": 2},
                "max_tokens": 12,
                "group_size": 6,
                "tasks_per_step": 2,
                "stop": list("ACEGIKMOQSUWYacegikmoqsuwy"),
            },
            multi_turn={
                "environment": "tests.rl.strategies.test_turn_trees:Loud",
                "max_tokens": 120,
            },
            credit={"name": "portool"},
            optimiser={"lr": 1e-3, "micro_batch_tokens": 4000},
        )
        return Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens())

    whole, first = trainer_of("a"), trainer_of("b")
    reports = [whole.step() for _ in range(3)]
    assert all(len(g.rollouts) == 6 for r in reports for g in r.groups)
    assert any(r.figures["grad_norm"] > 0 for r in reports)
    assert all(r.figures["hinted_rollouts"] == 0 for r in reports)
    first.step()
    first.save()
    second = trainer_of("b")
    assert second.resume()
    for report in reports[1:]:
        assert comparable(second.step().figures) == comparable(report.figures)
    assert fingerprint(second) == fingerprint(whole)
    assert np.isfinite(reports[-1].figures["loss"])
