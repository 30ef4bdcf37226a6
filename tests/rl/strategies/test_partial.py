"""Groups that stay in flight over several steps: tokens, log-probs, windows, resume."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.rl.test_trainer import comparable, fingerprint
from tests.rl.tiny import CharTokenizer, EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.protocols import Generated, Sampling
from tfgrpo.rl.generation.requests import GroupRequest, OnDone
from tfgrpo.rl.rollouts.curriculum import Draw
from tfgrpo.rl.rollouts.grading import Grader
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.single_turn import SingleTurnMaker
from tfgrpo.rl.strategies.partial import PartialRolls
from tfgrpo.rl.strategy_options import PartialOptions
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rl.update.rollout_rows import row_of
from tfgrpo.rollout import Task

LIMIT = 60


class Clock:
    """Decodes all rows side by side, a token a tick; a row's length is fixed by its seed."""

    def __init__(self) -> None:
        self.sampled = 0
        self.ticks = 0

    def length(self, seed: int) -> int:
        return LIMIT if seed % 5 == 0 else 3 + seed % 7

    def run(
        self, requests: Iterable[GroupRequest], sampling: Sampling, on_done: OnDone, feed: Any
    ) -> None:
        rows = [[r, [], []] for r in requests]
        while rows:
            self.ticks += 1
            for row in list(rows):
                request, ids, logps = row
                at = request.start + len(ids)
                if feed.is_cancelled(request, len(ids)):
                    rows.remove(row)
                    on_done(request, [Generated(tuple(ids), tuple(logps), "partial")])
                    continue
                ids.append(3 + (request.seeds[0] + at) % 50)
                logps.append(-float(self.ticks))
                self.sampled += 1
                is_end = at + 1 == self.length(request.seeds[0])
                if is_end or len(ids) == request.max_tokens:
                    rows.remove(row)
                    finish = "stop" if is_end and at + 1 < LIMIT else "length"
                    on_done(request, [Generated(tuple(ids), tuple(logps), finish)])


def rolls(clock: Clock, **options: Any) -> PartialRolls:
    prompter = Prompter(CharTokenizer(), context_tokens=400)
    grader = Grader(prompter, EvenTokens())
    plain = SingleTurnMaker(clock, grader, Sampling(max_tokens=LIMIT), policy_id="p")
    return PartialRolls(plain, PartialOptions(**options))


class Tasks:
    """Ever new tasks."""

    def __init__(self) -> None:
        self.number = 0

    def draw(self, n: int, taken: Iterable[str]) -> list[Draw]:
        self.number += n
        return [Draw(Task(f"t{self.number - i}", "x"), 4) for i in range(n)]


@pytest.mark.parametrize("window", [0, 10])
def test_every_token_that_was_sampled_is_in_a_row_or_stored_and_none_twice(window: int) -> None:
    clock, tasks = Clock(), Tasks()
    flying = rolls(clock, over=2.0, window=window)
    trained, seen = 0, set()
    for step in range(12):
        found = flying.step(3, tasks.draw, seed=step, step=step)
        assert len(found.groups) == 3 and all(len(g.rollouts) == 4 for g in found.groups)
        for group in found.groups:
            assert group.group_id not in seen
            seen.add(group.group_id)
            for rollout in group.rollouts:
                ids = rollout.steps[0].token_ids or ()
                seed = rollout.seed or 0
                assert len(ids) == clock.length(seed)
                assert ids == tuple(3 + (seed + t) % 50 for t in range(len(ids)))
                assert rollout.is_truncated == (len(ids) == LIMIT)
                trained += len(ids)
        assert clock.sampled == trained + found.figures["partial_tokens_kept"]
        assert flying.figures.completion_tokens <= clock.sampled


def test_log_probs_are_those_of_the_step_that_sampled_each_token() -> None:
    clock, tasks = Clock(), Tasks()
    flying = rolls(clock, over=2.0)
    ended: dict[int, int] = {}
    resumed = 0
    for step in range(8):
        before = clock.ticks
        found = flying.step(2, tasks.draw, seed=step, step=step)
        ended[step] = clock.ticks
        for group in found.groups:
            for rollout in group.rollouts:
                logps = rollout.steps[0].logprobs or ()
                ticks = [-int(p) for p in logps]
                assert ticks == sorted(ticks)
                is_old = ticks[0] <= before
                assert (rollout.rollout_id in found.resumed) == is_old
                resumed += is_old and ticks[-1] > before
    assert resumed > 0, "no rollout went over a seam"


def test_a_window_bounds_the_steps_that_a_reply_takes() -> None:
    clock, tasks = Clock(), Tasks()
    flying = rolls(clock, over=3.0, window=20)
    began: dict[str, int] = {}
    for step in range(20):
        for row in flying.state_dict()["groups"]:
            began.setdefault(row["task"]["task_id"], step - 1)
        found = flying.step(2, tasks.draw, seed=step, step=step)
        for group in found.groups:
            assert step - began.get(group.task.task_id, step) <= LIMIT // 20 + 1


def test_fewer_ticks_are_needed_a_step_where_lengths_have_a_long_tail() -> None:
    steps = 14
    ticks = {}
    for over in (1.0, 2.5):
        clock, tasks = Clock(), Tasks()
        flying = rolls(clock, over=over)
        for step in range(steps):
            assert len(flying.step(3, tasks.draw, seed=step, step=step).groups) == 3
        ticks[over] = clock.ticks / steps
    assert ticks[2.5] < 0.75 * ticks[1.0]


class Half(EvenTokens):
    """As it is."""


def trainer_of(folder: Path, strategy: str = "april", **options: Any) -> Trainer:
    rollout = {
        "strategy": strategy,
        "strategy_options": options,
        "fixed_rows": True,
        "max_rows": 12,
        "poll_steps": 2,
        "max_tokens": 16,
        "group_size": 3,
        "tasks_per_step": 2,
    }
    optimiser = {"lr": 1e-3, "micro_batch_tokens": 4000}
    config = tiny_config(folder, rollout=rollout, optimiser=optimiser)
    return Trainer(config, tiny_parts(), tiny_tasks(8), Half())


def test_nothing_begun_beyond_the_step_is_grpo_bit_by_bit(tmp_path: Path) -> None:
    april, plain = trainer_of(tmp_path / "a", over=1.0), trainer_of(tmp_path / "b", "plain")
    for _ in range(2):
        got, want = april.step(), plain.step()
        assert [g.to_dict() for g in got.groups] == [g.to_dict() for g in want.groups]
    assert fingerprint(april) == fingerprint(plain)


def test_a_run_with_groups_in_flight_goes_on_bit_equal_and_trains_over_its_samplers(
    tmp_path: Path,
) -> None:
    whole, first = trainer_of(tmp_path / "a", over=2.0), trainer_of(tmp_path / "b", over=2.0)
    reports = [whole.step() for _ in range(5)]
    for _ in range(3):
        first.step()
    first.save()
    second = trainer_of(tmp_path / "b", over=2.0)
    assert second.resume()
    for report in reports[3:]:
        assert comparable(second.step().figures) == comparable(report.figures)
    assert fingerprint(second) == fingerprint(whole)
    assert sum(r.figures["resumed_rollouts"] for r in reports) > 0
    sampled = sum(r.figures["completion_tokens"] for r in reports)
    rows = [row_of(x, index=0) for r in reports for g in r.groups for x in g.rollouts]
    assert sampled == sum(r.n_loss for r in rows) + reports[-1].figures["partial_tokens_kept"]
    for report in reports:
        assert [len(g.rollouts) for g in report.groups] == [3, 3]


def test_a_resumed_rows_ratio_is_to_what_its_sampler_reported(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, over=2.0)
    trainer.step()
    for number in range(1, 6):
        rolled = trainer._roller.roll(number)
        if rolled.replayed:
            break
    assert rolled.replayed
    rows, stale = trainer._row_maker.rows(rolled.groups, 1, replayed=rolled.replayed)
    graded = [r for g in rolled.groups for r in g.graded]
    assert stale == {i for i, r in enumerate(graded) if r.rollout_id in rolled.replayed}
    scored = trainer.updater._with_scores(list(rows), False, stale)
    for row in scored:
        told = graded[row.row.index].steps[0].logprobs
        if row.row.index in stale:
            assert row.old_logp == told
