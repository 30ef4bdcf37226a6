"""Which tasks are practised: all once, then those that the library gets wrong."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.experience.cases import group
from tfgrpo.experience import Library
from tfgrpo.experience.claim import Claim
from tfgrpo.experience.edits import Edit
from tfgrpo.learning.practice import first_pass, focused_pass, task_needs
from tfgrpo.learning.unverified import majority_graded
from tfgrpo.rollout import Message, Rollout, RolloutGroup, Step, Task

TASKS = [Task(f"t{i}", f"task {i}") for i in range(12)]


def library(*claims: Claim) -> Library:
    edits = [Edit("add", f"Rule number {i} of many.", claim=c) for i, c in enumerate(claims)]
    return Library().apply(edits, deduplicate=False).library


def informed(made: RolloutGroup) -> RolloutGroup:
    return replace(made, context=library(Claim()).context())


@given(size=st.integers(1, 13), epoch=st.integers(0, 3), seed=st.integers(0, 5))
def test_a_first_pass_takes_every_task_once_in_a_seeded_order(
    size: int, epoch: int, seed: int
) -> None:
    batches = first_pass(TASKS, epoch, seed, size)
    flat = [t.task_id for b in batches for t in b.items]
    assert sorted(flat) == sorted(t.task_id for t in TASKS)
    assert all(len(b.items) == size for b in batches[:-1])
    assert batches == first_pass(TASKS, epoch, seed, size)


@given(
    needs=st.dictionaries(st.sampled_from([t.task_id for t in TASKS]), st.floats(0.1, 2)),
    share=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_a_later_pass_draws_the_needy_and_a_stated_share_by_chance(
    needs: dict[str, float], share: float
) -> None:
    batches = focused_pass(TASKS, needs, 1, 0, size=5, random_share=share)
    flat = [t.task_id for b in batches for t in b.items]
    by_chance = min(12 - len(needs), math.ceil(share * 12))
    assert len(flat) == len(set(flat)) == len(needs) + by_chance
    assert all(b.focused == needs.keys() for b in batches)
    found = [needs[t] for t in flat[: len(needs)]]
    assert found == sorted(found, reverse=True), "the neediest come first"


def test_a_task_is_in_need_where_no_draw_under_the_library_is_right() -> None:
    held = library(Claim("", ("t0", "t1", "t2", "t7"), ("t3",)).judged())
    history = [
        informed(group(0, [0.0, 0.5])),  # wrong under entries
        informed(group(1, [0.0, 1.0])),  # one slip
        informed(group(7, [0.0])),  # a single draw tells too little; an entry cites it
        group(2, [0.0, 0.0]),  # failed before there was a library; an entry cites it
        group(3, [0.0, 0.0]),  # speaks against an entry
        group(4, [0.0, 0.0]),  # failed, and no entry cites it
        group(5, [1.0, 1.0]),
    ]
    needs = task_needs(TASKS[:8], history, held, 1.0)
    assert needs == {"t0": 0.5, "t3": 1.5, "t4": 1.0, "t6": 1.0}


def test_entries_on_trial_and_open_questions_call_their_tasks_back() -> None:
    trial = Claim("", ("t0",)).judged()
    asked = replace(Claim("", ("t1", "t2")).judged(), question="and on Sundays?")
    history = [group(i, [0.0, 0.0]) for i in range(3)]
    assert task_needs(TASKS[:3], history, library(trial, asked), 1.0) == dict.fromkeys(
        ("t0", "t1", "t2"), 1.5
    )


def test_without_a_verifier_the_majority_stands_in_and_says_so() -> None:
    answers = ["NET", "net.", "HW", "NET"]
    made = [
        Rollout(f"r{i}", "t", (Step(Message("assistant", a)),), "ungraded")
        for i, a in enumerate(answers)
    ]
    rollouts = (*made, Rollout("r9", "t").failed("provider_failed", "down"))
    graded = majority_graded(RolloutGroup("g", Task("t", "?"), rollouts))
    assert graded.rewards_G == (1.0, 1.0, 0.0, 1.0)
    assert "3 of 4" in graded.graded[0].score.feedback  # type: ignore[union-attr]
    assert graded.rollouts[-1].outcome == "provider_failed"
