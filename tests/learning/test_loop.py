"""The learning loop on scripted worlds: what is kept, what is refused, what is never looked at."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.learning.worlds import HARMFUL, HELPFUL, NEUTRAL, WORDS, World, journal, settings
from tfgrpo.errors import ConfigError, VerifierError
from tfgrpo.experience import EMPTY_LIBRARY, load_artefact
from tfgrpo.learning.learn import dry_run, learn
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task
from tfgrpo.sampling import Progress, Stop, Stopped
from tfgrpo.store import write_groups


def test_a_helpful_lesson_is_accepted_kept_and_proven(tmp_path: Path) -> None:
    result = World(lesson=HELPFUL).learn(settings(tmp_path))
    assert [e.text for e in result.library.shown] == [HELPFUL]
    assert result.exit_code == 0 and result.verdict is not None and result.verdict.status == "met"
    assert result.learned.proof is not None and result.learned.proof.difference is not None
    assert result.learned.proof.difference.low > 0
    artefact = load_artefact(tmp_path / "run")
    assert [e.text for e in artefact.library.shown] == [HELPFUL]
    assert HELPFUL in json.dumps(result.to_dict())


@pytest.mark.parametrize("lesson", [HARMFUL, ""])
def test_nothing_is_kept_when_nothing_helps(tmp_path: Path, lesson: str) -> None:
    result = World(lesson=lesson).learn(settings(tmp_path))
    assert result.library == EMPTY_LIBRARY and result.learned.choice.is_empty
    assert result.exit_code == 1
    assert result.learned.proof is not None
    assert result.learned.proof.empty == result.learned.proof.final
    assert not (tmp_path / "run" / "library.json").exists()


def test_a_lesson_without_effect_never_wins_over_the_empty_library(tmp_path: Path) -> None:
    result = World(lesson=NEUTRAL).learn(settings(tmp_path, gate={"max_harm": 1.0}))
    assert result.learned.accepted, "so wide a gate lets the lesson through"
    assert result.learned.choice.is_empty and "includes zero" in result.learned.choice.reason


def test_a_harmful_proposal_is_rejected_and_kept_with_its_evidence(tmp_path: Path) -> None:
    result = World(lesson=HARMFUL).learn(settings(tmp_path))
    assert result.learned.accepted == ()
    assert "accepted none" in result.learned.choice.reason
    with journal(tmp_path) as store:
        gates = [row for _, row in store.decisions("gate")]
        rejected = [row for _, row in store.decisions("rejected_edit")]
    assert gates and not any(row["accepted"] for row in gates)
    assert gates[0]["difference"]["estimate"] < 0
    assert HARMFUL in json.dumps(rejected) and "below" in rejected[0]["reason"]


def test_the_test_split_is_touched_once_after_the_choice_and_splits_are_disjoint(
    tmp_path: Path,
) -> None:
    world = World()
    result = world.learn(settings(tmp_path, learn={"epochs": 2}))
    ids = result.splits.to_dict()
    sets = [set(ids[name]) for name in ("practice", "gate", "test")]
    assert sum(map(len, sets)) == len(set().union(*sets)) == 36
    by_stage = {stage: {task for s, task in world.asked if s == stage} for stage, _ in world.asked}
    assert by_stage["practice"] == sets[0]
    assert by_stage["gate"] == sets[1]
    assert by_stage["test"] == sets[2]
    stages = [stage for stage, _ in world.asked]
    first = stages.index("test")
    assert set(stages[first:]) == {"test"}
    assert by_stage["replay"] <= sets[0], "only practice tasks are rolled again"
    with journal(tmp_path) as store:
        order = [str(g.metadata["stage"]) for g in store.groups()]
        for group in store.groups():
            stage = str(group.metadata["stage"])
            assert group.task.task_id in ids["practice" if stage == "replay" else stage]
    assert set(order[order.index("test") :]) == {"test"}


def test_every_epoch_is_a_set_of_groups_of_its_own(tmp_path: Path) -> None:
    world = World(lesson="")
    result = world.learn(settings(tmp_path, learn={"epochs": 2, "preset": "contrast"}))
    with journal(tmp_path) as store:
        groups = list(store.groups("practice"))
    assert len(groups) == 24 and len({g.group_id for g in groups}) == 24
    assert sum(len(g.rollouts) for g in groups) == 96 == result.outcomes["practice"]["graded"]
    seeds = [r.seed for g in groups for r in g.rollouts]
    assert len(set(seeds)) == 96, "a second epoch draws anew"


def test_two_seeds_make_different_batches_and_one_seed_makes_equal_ones(tmp_path: Path) -> None:
    def batches(name: str, seed: int) -> list[list[str]]:
        config = settings(tmp_path / name, learn={"seed": seed, "epochs": 2})
        World(lesson="").learn(config)
        with journal(tmp_path / name) as store:
            by_id = {g.group_id: g.task.task_id for g in store.groups("practice")}
            rows = [row for _, row in store.decisions("step")]
        return [[by_id[g] for g in row["group_ids"]] for row in rows]

    first, again, other = batches("a", 1), batches("b", 1), batches("c", 2)
    assert first == again != other
    assert first[:2] != first[2:], "epochs are shuffled apart"
    assert sorted(chain(*first[:2])) == sorted(chain(*other[:2]))


@pytest.mark.parametrize("preset", ["paper-main", "paper-preview"])
def test_published_presets_run_end_to_end(tmp_path: Path, preset: str) -> None:
    world = World()
    config = settings(tmp_path, learn={"preset": preset}, gate={"enabled": False})
    result = world.learn(config)
    assert any(HELPFUL in e.text for e in result.library.shown)
    assert world.stages["gate"] == 0
    assert result.exit_code == 0, result.verdict
    if preset == "paper-main":
        assert world.stages["summarise"] > 0


def test_single_repairs_are_switched_by_name(tmp_path: Path) -> None:
    config = settings(tmp_path, learn={"preset": "paper-main"}).model_copy(
        update={"repairs": {"delete_by_id": True}}
    )
    assert World().learn(config).exit_code == 0
    wrong = config.model_copy(update={"repairs": {"delete_by_idd": True}})
    with pytest.raises(ConfigError, match="delete_by_idd"):
        World().learn(wrong)


def test_exemplars_are_learnt_without_a_critic(tmp_path: Path) -> None:
    world = World(turns_help=True)
    result = world.learn(settings(tmp_path, learn={"entries": "exemplars"}))
    kinds = {e.kind for e in result.library.shown}
    assert kinds == {"exemplar"} and result.exit_code == 0
    assert not {"contrast", "summarise", "merge", "update"} & world.stages.keys()
    practice = set(result.splits.to_dict()["practice"])
    assert {t for e in result.library.shown for t in e.provenance.task_ids} <= practice


def test_lessons_and_exemplars_are_gated_together_and_apart(tmp_path: Path) -> None:
    world = World(lesson=HARMFUL, turns_help=True)
    result = world.learn(settings(tmp_path, learn={"entries": "both"}))
    assert {e.kind for e in result.library.shown} == {"exemplar"}, "the harmful lesson stays out"
    with journal(tmp_path) as store:
        rows = [row for _, row in store.decisions("gate")]
    assert [r["accepted"] for r in rows if r["step"] == 1].count(True) >= 1
    assert len([r for r in rows if r["step"] == 1]) == 3


def test_saved_traces_teach_without_a_practice_rollout(tmp_path: Path) -> None:
    old = World()
    tasks = [Task(f"old{i}", f"stored question {i} of another kind", f"key{i}") for i in range(6)]
    traces = [
        RolloutGroup(
            f"g{t.task_id}",
            t,
            tuple(
                Rollout(
                    f"{t.task_id}-{i}",
                    t.task_id,
                    (Step(Message("assistant", str(t.reference) if i else "no idea")),),
                    "graded",
                    Score(float(i > 0)),
                    sample_index=i,
                )
                for i in range(3)
            ),
            policy_id="saved",
        )
        for t in tasks
    ]
    write_groups(tmp_path / "traces.jsonl", traces)
    config = settings(
        tmp_path, tasks={"traces": str(tmp_path / "traces.jsonl"), "practice": None, "gate": 18,
                         "test": 18},
    )  # fmt: skip
    result = old.learn(config)
    assert old.stages["practice"] == 0 and old.stages["gate"] > 0
    assert [e.text for e in result.library.shown] == [HELPFUL] and result.exit_code == 0


def test_traces_alone_give_an_unproven_library(tmp_path: Path) -> None:
    first = World()
    first.learn(settings(tmp_path / "a"))
    with journal(tmp_path / "a") as store:
        write_groups(tmp_path / "t.jsonl", list(store.groups("practice")))
    world = World()
    config = settings(
        tmp_path, tasks={"traces": str(tmp_path / "t.jsonl"), "practice": None, "gate": None,
                         "test": None},
    )  # fmt: skip
    result = learn(config, opener=world.opener)
    assert set(world.stages) <= {"panel", "replay"}
    assert [e.text for e in result.library.shown] == [HELPFUL]
    assert result.learned.proof is None and "unproven" in result.learned.choice.reason


def test_a_stop_ends_learning_from_traces_before_the_next_step(tmp_path: Path) -> None:
    first = World()
    first.learn(settings(tmp_path / "a"))
    with journal(tmp_path / "a") as store:
        write_groups(tmp_path / "t.jsonl", list(store.groups("practice")))
    stop, world = Stop(), World()
    stop.request()
    with pytest.raises(Stopped):
        learn(settings(tmp_path, tasks={"traces": str(tmp_path / "t.jsonl"), "practice": None,
                                        "gate": None, "test": None}),
              opener=world.opener, stop=stop)  # fmt: skip
    assert world.calls == 0


def test_traces_of_gate_or_test_tasks_are_refused(tmp_path: Path) -> None:
    first = World()
    first.learn(settings(tmp_path / "a"))
    with journal(tmp_path / "a") as store:
        write_groups(tmp_path / "t.jsonl", list(store.groups("practice")))
    config = settings(
        tmp_path,
        tasks={"traces": str(tmp_path / "t.jsonl"), "practice": 2, "gate": 17, "test": 17},
    )
    world = World()
    with pytest.raises(ConfigError, match="traces"):
        world.learn(config)
    assert world.calls == 0


def test_the_allocator_decides_how_many_rollouts_a_task_gets(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []

    def allocate(tasks: Any, history: Any, budget: int) -> list[int]:
        seen.append((len(tasks), len(history), budget))
        return [budget - 2 * (len(tasks) - 1) - 0 if i == 0 else 2 for i in range(len(tasks))]

    world = World(lesson="")
    world.learn(settings(tmp_path), allocate=allocate)
    assert seen == [(6, 0, 24), (6, 6, 24)]
    with journal(tmp_path) as store:
        sizes = sorted(len(g.rollouts) for g in store.groups("practice"))
    assert sizes == [2] * 10 + [14, 14]


class Unsure:
    """A rule of top-ups: two draws of each task, then all of the rest to the first one."""

    def __init__(self) -> None:
        self.looks: list[tuple[list[int], int]] = []

    def first(self, tasks: Any, history: Any, budget: int) -> list[int]:
        return [2] * len(tasks)

    def more(self, tasks: Any, history: Any, rewards: Any, left: int) -> list[int]:
        self.looks.append(([len(r) for r in rewards], left))
        return [left, *([0] * (len(tasks) - 1))]


def test_practice_adds_to_groups_by_the_rules_that_training_uses(tmp_path: Path) -> None:
    world, rule = World(lesson=""), Unsure()
    world.learn(settings(tmp_path), allocate=rule)
    assert rule.looks == [([2] * 6, 12)] * 2
    with journal(tmp_path) as store:
        groups = list(store.groups("practice"))
    # a group that was added to is kept as the whole that it became
    whole = {g.group_id: g for g in groups}
    assert sorted(len(g.rollouts) for g in whole.values()) == [2] * 10 + [14, 14]
    for group in whole.values():
        first = group.rollouts[0].sample_index
        assert [r.sample_index for r in group.rollouts] == list(
            range(first, first + len(group.rollouts))
        )


def test_the_gate_compares_nearest_entries_with_all_of_them(tmp_path: Path) -> None:
    def lesson(prompt: str) -> str:
        words = sorted(set(re.findall(r"\b(" + "|".join(WORDS) + r")\b", prompt)))
        return f"{HELPFUL[:-1]}, and mind the {words[0]} of it."

    class Many(World):
        def _policy(self, request: Request, seed: int | None) -> Any:
            text = "\n".join(m.content for m in request.messages)
            found = HELPFUL[:-1] in text
            if found:
                messages = (Message("system", HELPFUL), *request.messages)
                request = Request(messages, sampling=request.sampling)
            return super()._policy(request, seed)

    world = Many(lesson=lesson)
    config = settings(
        tmp_path,
        learn={
            "preset": "contrast",
            "top_k": 1,
            "settings": {"merge": "deterministic", "update": "direct"},
        },
    )
    result = world.learn(config)
    with journal(tmp_path) as store:
        rows = dict(store.decisions("gate"))
    chosen = [row for key, row in rows.items() if key.startswith("selection")]
    assert len(chosen) == 1 and chosen[0]["proposed"].endswith("/top-1")
    assert result.exit_code == 0


def test_entries_carry_measured_values_when_chance_left_them_out(tmp_path: Path) -> None:
    config = settings(
        tmp_path,
        learn={"epochs": 4, "keep_share": 0.5, "preset": "contrast"},
        tasks={"practice": 24, "gate": 6, "test": 6},
        gate={"max_harm": 0.5},
    )
    result = World().learn(config)
    (entry,) = result.library.shown
    assert entry.value is not None and entry.value.estimate > 0.2
    with journal(tmp_path) as store:
        offered = [g for g in store.groups("practice") if g.metadata.get("offered")]
    assert any(not g.context.parts for g in offered) and any(g.context.parts for g in offered)


def test_groups_that_teach_nothing_cost_no_critic_call_and_say_so(tmp_path: Path) -> None:
    world = World(base=1.0)
    result = world.learn(settings(tmp_path))
    assert set(world.stages) == {"practice", "gate", "test"}
    assert result.library == EMPTY_LIBRARY and world.stages["gate"] == 48
    with journal(tmp_path) as store:
        messages = [row["message"] for _, row in store.decisions("step")]
    assert all("nothing to learn: 0 of 6 groups (0%) can teach" in m for m in messages)
    assert len(messages) == 1, "a gate at full marks ends practice"


def test_three_steps_of_unusable_replies_end_the_run_with_the_cause(tmp_path: Path) -> None:
    class Mumbling(World):
        def _critic(self, request: Request, seed: int | None) -> Any:
            super()._critic(request, seed)
            return "I would rather not say."

    world = Mumbling()
    result = world.learn(settings(tmp_path, learn={"batch": 2, "epochs": 2}))
    assert "3 steps gave no usable edit" in result.learned.stopped_by
    assert "critic model" in result.learned.stopped_by
    with journal(tmp_path) as store:
        assert len(store.decisions("step")) < 12
    assert result.learned.proof is not None, "what was learnt so far is still proven"


@pytest.mark.parametrize("mode", ["exclude", "grade"])
def test_cut_replies_are_excluded_or_graded_as_asked(tmp_path: Path, mode: str) -> None:
    world = World(lesson="")

    def cut(request: Request, seed: int | None) -> Completion | str:
        last = request.messages[-1].content
        task = next(t for t in world.tasks if str(t.prompt) in last)
        if (seed or 0) % 2:
            return Completion(str(task.reference), finish="length")
        return f"guess {(seed or 0) % 97}"

    world.answer = cut
    result = world.learn(settings(tmp_path, run={"on_truncated": mode}))
    counts = {k: sum(row.get(k, 0) for row in result.outcomes.values())
              for k in ("graded", "truncated")}  # fmt: skip
    with journal(tmp_path) as store:
        cuts = [r for g in store.groups() for r in g.rollouts if r.is_truncated]
    assert cuts
    if mode == "exclude":
        assert counts["truncated"] == len(cuts)
        assert all(r.outcome == "truncated" and r.reward is None for r in cuts)
    else:
        assert counts["truncated"] == 0
        assert {r.reward for r in cuts} == {1.0}


def test_without_a_gate_the_last_library_is_named_unproven_by_the_gate(tmp_path: Path) -> None:
    result = World().learn(settings(tmp_path, gate={"enabled": False}))
    assert "no gate" in result.learned.choice.reason and result.library.shown
    assert result.exit_code == 0


def test_a_verifier_that_always_raises_stops_within_a_handful_of_calls(tmp_path: Path) -> None:
    class Broken:
        verifier_id = "broken"
        reward_range = (0.0, 1.0)

        def check_task(self, task: Task) -> None:
            return None

        async def score(self, rollout: Rollout, task: Task) -> Score:
            raise ZeroDivisionError("planted")

    world = World()
    with pytest.raises(VerifierError, match="planted"):
        world.learn(settings(tmp_path), verifier=Broken())
    assert world.calls <= 9


def test_a_dry_run_calls_nothing_and_writes_nothing(tmp_path: Path) -> None:
    plan, splits = dry_run(settings(tmp_path), tasks=World().tasks)
    assert plan.calls_high > 0 and len(splits.test) == 12
    assert list(tmp_path.iterdir()) == []


def test_a_stop_request_keeps_what_is_done_and_the_same_call_goes_on(tmp_path: Path) -> None:
    stop = Stop()

    class View:
        def __enter__(self) -> View:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def say(self, text: str) -> None:
            return None

        def update(self, progress: Progress) -> None:
            if progress.stage == "practice" and progress.done == 7:
                stop.request()

    world = World()
    with pytest.raises(Stopped, match="kept"):
        world.learn(settings(tmp_path), view=View(), stop=stop)
    before = world.calls
    result = world.learn(settings(tmp_path))
    fresh = World()
    whole = fresh.learn(settings(tmp_path / "whole"))
    assert result.learned.proof == whole.learned.proof
    assert world.calls == fresh.calls and before < fresh.calls
    assert max(world.draws.values()) == 1
