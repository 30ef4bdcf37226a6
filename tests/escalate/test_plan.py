"""From evidence to a plan: every rule once, and what a person asks for stands over them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tfgrpo.context import Context, ContextPart
from tfgrpo.errors import ConfigError
from tfgrpo.escalate.cost import Cost, StageCost, cache_bytes, training_bytes
from tfgrpo.escalate.distil_stage import best_look, dealt
from tfgrpo.escalate.grpo_stage import practice_tasks
from tfgrpo.escalate.plan import GRPO_STEPS, RunEvidence, choose, make_plan
from tfgrpo.escalate.run_data import task_states
from tfgrpo.escalate.settings import EscalateSettings
from tfgrpo.escalate.student import Speed
from tfgrpo.messages import Message
from tfgrpo.report.advise import Advice
from tfgrpo.rl.model.shape import Shape
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task
from tfgrpo.statistics import Interval

GAIN = Interval(0.2, 0.1, 0.3, 0.9, 40)
RICH = RunEvidence(
    has_library=True,
    library_gain=GAIN,
    solved_with_library=0.5,
    practice_tasks=40,
    verified_tasks=12,
    all_fail_tasks=5,
    hintable_tasks=5,
    mixed_share=0.4,
    advice=(),
)
AUTO = EscalateSettings()


def test_a_library_that_solves_enough_is_imitated_and_practised_further() -> None:
    plan = make_plan(RICH, AUTO)
    assert (plan.distil, plan.grpo_steps, plan.hints) == ("supervised", GRPO_STEPS, False)
    assert "+0.200" in plan.distil_why and "50%" in plan.distil_why
    assert "40% of the groups" in plan.grpo_why and "advise" not in plan.grpo_why
    assert len(plan.lines()) == 3


@pytest.mark.parametrize(
    ("changes", "distil", "said"),
    [
        ({"solved_with_library": 0.1}, "forward_kl", "too few to imitate"),
        ({"library_gain": replace(GAIN, estimate=-0.1)}, "supervised", "only verified replies"),
        ({"library_gain": replace(GAIN, estimate=0.0), "verified_tasks": 1}, "none", "too few"),
        ({"has_library": False}, "supervised", "no library; 12 of 40"),
        ({"has_library": False, "verified_tasks": 2}, "none", "only 2 of 40"),
        ({"library_gain": None}, "supervised", "was not compared"),
    ],
)
def test_how_the_library_gets_into_the_weights(changes, distil, said) -> None:
    plan = make_plan(replace(RICH, **changes), AUTO)
    assert plan.distil == distil and said in plan.distil_why


def test_grpo_needs_mixed_groups_or_hints() -> None:
    flat = replace(RICH, mixed_share=0.05)
    assert make_plan(flat, AUTO).grpo_steps == 0
    stuck = replace(flat, all_fail_tasks=20, hintable_tasks=8)
    plan = make_plan(stuck, AUTO)
    assert plan.grpo_steps == GRPO_STEPS and plan.hints and "8 of them" in plan.hints_why
    bare = make_plan(replace(stuck, hintable_tasks=0, mixed_share=0.4), AUTO)
    assert not bare.hints and "none has `solution`" in bare.hints_why


def lever(name: str, gain: Interval) -> Advice:
    return Advice(name, name, "measured on groups", "ceiling", gain, "tokens", None)


def test_what_advise_says_is_told_and_can_decide() -> None:
    nothing = Interval(0.0, -0.1, 0.0, 0.9, 40)
    told = (lever("rl", GAIN), lever("hints", nothing))
    plan = make_plan(replace(RICH, advice=told), AUTO)
    assert "RL alone wins +0.200 [+0.100, +0.300] at most" in plan.grpo_why
    assert "worth +0.000" in plan.hints_why
    flat = replace(RICH, has_library=False, advice=(lever("rl", nothing),))
    plan = make_plan(flat, AUTO)
    assert plan.grpo_steps == 0 and "nothing to win" in plan.grpo_why
    assert make_plan(replace(flat, has_library=True), AUTO).grpo_steps == GRPO_STEPS


def test_what_was_asked_for_stands() -> None:
    plan = make_plan(RICH, EscalateSettings(method="reverse_kl", grpo_steps=0))
    assert (plan.distil, plan.grpo_steps, plan.hints) == ("reverse_kl", 0, False)
    plan = make_plan(replace(RICH, has_library=False), EscalateSettings(method="nudge"))
    assert plan.distil == "none" and "kept no library" in plan.distil_why
    assert make_plan(RICH, EscalateSettings(method="none")).distil == "none"


def test_settings_name_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        EscalateSettings.of(epoch=3)
    with pytest.raises(ConfigError, match="method"):
        EscalateSettings.of(method="sft")


def test_the_least_trained_of_equals_is_kept() -> None:
    scores = {
        "base": {"a": (0.5,)},
        "distilled": {"a": (0.5,)},
        "grpo": {"a": (0.25, 0.5)},
    }
    assert choose(scores)[0] == "base"
    assert choose({**scores, "grpo": {"a": (1.0,)}}) == (
        "grpo",
        "gate tasks, bare prompt: base 0.500, distilled 0.500, grpo 1.000",
    )
    assert best_look({"10": 0.3, "9": 0.3, "3": 0.1}) == "9"


def group(name: str, *rewards: float, solution: str = "") -> RolloutGroup:
    task = Task(name, "p", metadata={"solution": solution} if solution else {})
    step = Step(Message("assistant", "x"))
    rollouts = tuple(
        Rollout(f"{name}-{i}", name, steps=(step,)).graded(Score(r)) for i, r in enumerate(rewards)
    )
    return RolloutGroup(f"g-{name}", task, rollouts, Context(), "p")


def test_tasks_are_marked_with_what_the_run_knows() -> None:
    groups = [group("a", 1.0, 0.3), group("b", 0.3, 0.0, solution="s"), group("c", 1.0, 1.0)]
    states = task_states([g.task for g in groups] + [Task("d", "p")], groups, 1.0)
    assert [s.state for s in states] == ["mixed", "all_fail", "all_pass", "unknown"]
    assert states[1].marked().metadata["escalate"] == {
        "state": "all_fail",
        "verified": 0,
        "hint_from": "solution",
    }
    assert states[1].marked().metadata["solution"] == "s"


def test_what_can_teach_is_mixed_or_can_be_hinted() -> None:
    groups = [
        group("a", 1.0, 0.0),
        group("b", 0.0, 0.0, solution="s"),
        group("c", 0.0, 0.0),
        group("d", 1.0, 1.0, solution="s"),
    ]
    assert [t.task_id for t in practice_tasks(groups, 1.0, hints=False)] == ["a"]
    assert [t.task_id for t in practice_tasks(groups, 1.0, hints=True)] == ["a", "b"]


def test_a_library_is_dealt_into_strategies_without_loss() -> None:
    parts = tuple(ContextPart("lesson", str(i)) for i in range(5))
    hands = dealt(Context(parts, "user"), 2)
    assert [len(h.parts) for h in hands] == [3, 2]
    assert {p for h in hands for p in h.parts} == set(parts)
    assert all(h.placement == "user" for h in hands)
    assert len(dealt(Context(parts[:1]), 2)) == 1


def test_adapters_take_less_memory_than_all_weights() -> None:
    shape = Shape("llama", 1000, 64, 4, 4, 2, 16, 128, 512, 1e-5, True, False, False)
    parameters = 1000 * 64 + 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    small = EscalateSettings(micro_batch_tokens=64)
    whole = training_bytes(shape, parameters, small)
    adapters = training_bytes(
        shape, parameters, EscalateSettings(**small.model_dump() | {"lora_rank": 2})
    )
    assert whole > 20 * parameters and adapters < whole
    # 3 rows of 10 tokens, 4 layers, keys and values of 2 heads of 16 numbers of 4 bytes.
    assert cache_bytes(shape, 3, 10) == 3 * 10 * 4 * 2 * 2 * 16 * 4


def test_a_cost_is_told_in_hours_and_minutes() -> None:
    stages = tuple(
        StageCost(name, 8, 100, 64, 128, 0, seconds)
        for name, seconds in (("draws", 47.0), ("distil", 12259.0))
    )
    lines = Cost(stages, 3_000_000_000, Speed(900.0, 150.0)).lines()
    assert lines[1].rstrip().endswith("≈47 s") and lines[2].rstrip().endswith("≈3 h 24 min")
    assert lines[-1].startswith("in all about 3 h 25 min, measured at 900 tokens read")
