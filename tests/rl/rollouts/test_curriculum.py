"""Curricula: what is drawn, what is dropped, what is used again, and the same after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rl.test_trainer import comparable, fingerprint, metrics
from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.errors import ConfigError
from tfgrpo.protocols import Allocator, GroupVerifier
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.config_sections import CurriculumConfig
from tfgrpo.rl.rollouts.curriculum import Curriculum
from tfgrpo.rl.rollouts.replay_buffer import Replay
from tfgrpo.rl.rollouts.step_groups import _next_size
from tfgrpo.rl.trainer import Trainer, TrainerParts
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task
from tfgrpo.routing.budgets.factory import open_allocator
from tfgrpo.routing.budgets.practice import Practice
from tfgrpo.runtime.canonical import derive_seed


def curriculum(n: int = 6, *, allocate: Any = None, **settings: Any) -> Curriculum:
    return Curriculum(
        CurriculumConfig(**settings),
        tiny_tasks(n),
        tasks_per_step=3,
        group_size=4,
        seed=1,
        allocate=allocate,
    )


def ids(draws: Sequence[Any]) -> list[str]:
    return [d.task.task_id for d in draws]


def test_a_profiling_pass_keeps_the_band_and_a_share_of_the_unsolved() -> None:
    made = curriculum(8, profile=4, band=(0.25, 0.75), unsolved_share=0.5)
    wins = {"t0": 0, "t1": 1, "t2": 2, "t3": 3, "t4": 4, "t5": 0, "t6": 0, "t7": 0}
    figures = made.profiled((t, [1.0] * k + [0.0] * (4 - k)) for t, k in wins.items())
    lucky = {t for t, k in wins.items() if k == 0 and derive_seed(1, "unsolved", t) / 2**31 < 0.5}
    assert 0 < len(lucky) < 4
    assert {t.task_id for t in made.tasks} == {"t1", "t2", "t3"} | lucky
    assert figures["profile_rollouts"] == 32
    assert figures["profile_success_share"] == pytest.approx(10 / 32)
    assert figures["profile_unsolved_share"] == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="keeps none of 2 tasks: 1 had no success and 1 only"):
        curriculum(2, profile=1, band=(0.4, 0.6)).profiled([("t0", [0.0]), ("t1", [1.0])])


def test_easy_tasks_come_first_in_every_epoch() -> None:
    made = curriculum(6, profile=4, order="easy_first")
    made.profiled((f"t{i}", [1.0] * k + [0.0] * (4 - k)) for i, k in enumerate([2, 4, 0, 3, 1, 4]))
    epochs = [ids(made.draw(3)) + ids(made.draw(3)) for _ in range(2)]
    for order in epochs:
        assert set(order[:2]) == {"t1", "t5"} and order[2:] == ["t3", "t0", "t4", "t2"]


def test_a_task_outside_the_band_rests_and_comes_back() -> None:
    made = curriculum(6, rest_epochs=2, band=(0.1, 0.9))
    while made.epoch < 5:
        draws = made.draw(1)
        made.note((t, [1.0, 1.0] if t == "t0" else [1.0, 0.0]) for t in ids(draws))
    epochs = {
        t: [o.epoch for o in made.history if o.task_id == t and o.epoch < 5]
        for t in ["t0", "t1", "t2"]
    }
    assert epochs == {"t0": [0, 3], "t1": [0, 1, 2, 3, 4], "t2": [0, 1, 2, 3, 4]}


def test_when_all_tasks_rest_they_are_drawn_all_the_same() -> None:
    made = curriculum(3, rest_epochs=9, band=(0.1, 0.9))
    made.note((t, [1.0, 1.0]) for t in ids(made.draw(3)))
    assert sorted(ids(made.draw(3))) == ["t0", "t1", "t2"]


def test_a_step_holds_no_task_twice_when_rounds_cross_an_epoch() -> None:
    made = curriculum(4)
    first = made.draw(3)
    more = made.draw(3, ids(first))
    assert len(set(ids(first) + ids(more))) == len(ids(first) + ids(more)) == 4
    assert made.draw(3, ids(first) + ids(more)) == []


def allocator_of(c: CurriculumConfig) -> Allocator | None:
    return open_allocator(c.allocate, c.allocate_options, group_size=4, where="curriculum.allocate")


class Sizes:
    """An allocator that keeps what it was asked."""

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)
        self.asked: list[tuple[list[str], list[tuple[str, tuple[float, ...]]], int]] = []

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        seen = [(g.task.task_id, g.rewards_G) for g in history]
        self.asked.append(([t.task_id for t in tasks], seen, budget))
        return self.counts[: len(tasks)] + [0] * (len(tasks) - len(self.counts))


def test_an_allocator_gives_sizes_and_sees_what_became_of_groups() -> None:
    sizes = Sizes(6, 4, 2)
    made = curriculum(allocate=sizes)
    first = made.draw(3)
    assert [d.size for d in first] == [6, 4, 2]
    made.note((t, [1.0, 0.0]) for t in ids(first))
    made.draw(3)
    (_, nothing, budget), (_, seen, _) = sizes.asked
    assert nothing == [] and budget == 12
    assert seen == [(t, (1.0, 0.0)) for t in ids(first)]
    wide = curriculum(allocate=(everything := Sizes(0, 12)), candidates="all")
    drawn = wide.draw(3)
    assert len(everything.asked[0][0]) == 6
    assert ids(drawn) == [everything.asked[0][0][1]] and drawn[0].size == 12
    for wrong in (Sizes(9, 9), Sizes(-1)):
        with pytest.raises(ConfigError, match="at most the budget"):
            curriculum(allocate=wrong).draw(3)


@pytest.mark.parametrize("name", ["posterior_gain", "vade", "sgpo", "gdro", "xrpo"])
def test_allocators_are_found_by_name(name: str) -> None:
    allocate = allocator_of(CurriculumConfig(allocate=name))
    assert allocate is not None
    counts = allocate(tiny_tasks(3), [], 12)
    assert len(counts) == 3 and sum(counts) <= 12


def test_a_wrong_allocator_is_named() -> None:
    with pytest.raises(
        ConfigError, match="allowed are practice, v0, top_up, uniform, posterior_gain"
    ):
        allocator_of(CurriculumConfig(allocate="best"))
    with pytest.raises(ConfigError, match=r"curriculum\.allocate 'vade'"):
        allocator_of(CurriculumConfig(allocate="vade", allocate_options={"depth": 1}))
    with pytest.raises(ConfigError, match="needs the option router"):
        allocator_of(CurriculumConfig(allocate="v0"))


def test_a_value_model_gives_budgets(tmp_path: Path) -> None:
    from tfgrpo.routing.estimator.value_model import ValueModel
    from tfgrpo.routing.router_files import RouterFiles
    from tfgrpo.runtime.embedders import open_embedder

    RouterFiles(ValueModel(open_embedder("hashed")), "hashed", [], []).save(tmp_path)
    options = {"router": str(tmp_path), "floor": 2, "cap": 8}
    allocate = allocator_of(CurriculumConfig(allocate="v0", allocate_options=options))
    made = curriculum(6, allocate=allocate, candidates="all")
    for _ in range(4):
        draws = made.draw(3)
        assert 0 < sum(d.size for d in draws) <= 12
        made.note((t, [1.0, 0.0, 0.0]) for t in ids(draws))
    known = made.known(made.tasks)
    assert len(known) == 6 and all(0 < k["predicted"] < 1 for k in known)


def test_the_next_round_is_sized_by_the_share_of_mixed_groups() -> None:
    assert _next_size(8, 0, 0) == 8
    assert _next_size(8, 4, 8) == 8  # half are mixed: twice the missing four
    assert _next_size(8, 6, 8) == 3
    assert _next_size(8, 7, 80) == 4  # never above four times the missing ones
    assert _next_size(8, 4, 4.5) == 5  # groups that were stopped early cost a part of a group


class Mixed(EvenTokens):
    """Groups of even-numbered tasks are mixed, the others flat."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        flat = int(task.task_id[1:]) % 2
        return Score(1.0 if flat else float(rollout.sample_index % 2))


def trainer(folder: Path, n: int = 8, **sections: Any) -> Trainer:
    allocate = sections.pop("with_allocator", None)
    config = tiny_config(folder, **sections)
    return Trainer(
        config, tiny_parts(), tiny_tasks(n), Mixed(),
        parts=TrainerParts(allocate=allocate or allocator_of(config.curriculum)),
    )  # fmt: skip


def test_dynamic_sampling_fills_the_step_with_mixed_groups(tmp_path: Path) -> None:
    report = trainer(tmp_path, curriculum={"max_resample_rounds": 4}).step()
    assert len(report.groups) == 3
    assert all(g.is_informative() for g in report.groups)
    figures = report.figures
    assert figures["groups_rolled"] == 3 + figures["groups_dropped"]
    assert figures["rollouts"] == 4 * figures["groups_rolled"]
    # eight tasks hold four mixed ones: with enough rounds three of them are always found
    assert 1 <= figures["rounds"] <= 4


def test_dynamic_sampling_stops_at_its_limit(tmp_path: Path) -> None:
    class Flat(EvenTokens):
        async def score(self, rollout: Rollout, task: Task) -> Score:
            return Score(1.0)

    config = tiny_config(tmp_path, curriculum={"max_resample_rounds": 2})
    made = Trainer(config, tiny_parts(), tiny_tasks(20), Flat())
    before = fingerprint(made)
    report = made.step()
    assert report.groups == [] and report.figures["rounds"] == 2
    assert report.figures["groups_dropped"] == report.figures["groups_rolled"] == 6
    assert report.figures["reward_mean"] == 1.0  # of all that was rolled
    assert fingerprint(made) == before


def test_a_later_round_that_cannot_be_graded_stops_nothing(tmp_path: Path) -> None:
    class Once(EvenTokens):
        """Grades the first tasks that it sees; the first round is mixed in one group."""

        def __init__(self) -> None:
            self.seen: set[str] = set()

        async def score(self, rollout: Rollout, task: Task) -> Score:
            self.seen.add(task.task_id)
            if len(self.seen) > 3:
                raise KeyError("gone")
            first = task.task_id == min(self.seen)
            return Score(float(rollout.sample_index % 2) if first else 1.0)

    config = tiny_config(tmp_path, curriculum={"max_resample_rounds": 2})
    report = Trainer(config, tiny_parts(), tiny_tasks(12), Once()).step()
    assert report.figures["rounds"] == 2 and report.figures["graded_share"] < 1
    assert 1 <= len(report.groups) <= 3


def test_greedy_baselines_are_there_for_replayed_groups_too(tmp_path: Path) -> None:
    made = trainer(tmp_path, curriculum={"replay": 2}, loss={"advantage": "remax"})
    assert sum(made.step().figures["groups_replayed"] for _ in range(4)) > 0


def test_the_profiling_pass_is_paid_once_and_counted(tmp_path: Path) -> None:
    made = trainer(tmp_path, curriculum={"profile": 2, "band": [0.25, 0.75]})
    first = made.step().figures
    assert first["profile_rollouts"] == 16 and first["profile_tasks_kept"] == 4
    assert "profile_rollouts" not in made.step().figures
    assert {t.task_id for t in made.curriculum.tasks} == {"t0", "t2", "t4", "t6"}


def test_group_sizes_reach_the_rollouts(tmp_path: Path) -> None:
    report = trainer(tmp_path, with_allocator=Sizes(6, 4, 2)).step()
    assert [len(g.rollouts) for g in report.groups] == [6, 4, 2]


@pytest.mark.parametrize("loss", ["clip", "decoupled_clip"])
def test_replayed_groups_keep_their_samplers_log_probs(
    tmp_path: Path, monkeypatch: Any, loss: str
) -> None:
    made = trainer(tmp_path, curriculum={"replay": 2}, optimiser={"lr": 1e-2}, loss={"name": loss})
    seen: list[Any] = []
    real = made.updater._with_scores

    def watch(*given: Any) -> Any:
        start = made.updater.score(given[0])
        seen.append((real(*given), given[2], start))
        return seen[-1][0]

    monkeypatch.setattr(made.updater, "_with_scores", watch)
    replayed = 0
    for _ in range(4):
        report = made.step()
        rows, stale, old = seen[-1]
        now = made.updater.score([r for r in rows if r.row.index in stale]) if stale else {}
        for row in rows:
            if row.row.index in stale:
                assert row.engine_logp != now[row.row.index]  # the weights have moved since
                # π_old is what sampled it; a decoupled loss weighs by that and clips from now
                assert row.old_logp == (row.engine_logp if loss == "clip" else old[row.row.index])
            elif stale:
                assert row.old_logp == pytest.approx(row.engine_logp, abs=1e-4)
        replayed += report.figures["groups_replayed"]
        tasks = [g.task.task_id for g in report.groups]
        assert len(set(tasks)) == len(tasks)
    assert replayed > 0


def group(task_id: str, rewards: Sequence[float]) -> RolloutGroup:
    task = Task(task_id, "x")
    rollouts = tuple(
        Rollout(f"{task_id}-{i}", task_id).graded(Score(r)) for i, r in enumerate(rewards)
    )
    return RolloutGroup(task_id, task, rollouts)


def test_replay_keeps_mixed_groups_up_to_its_size_and_age() -> None:
    kept = Replay(keep=2, age=3, seed=0)
    kept.add([group("a", [1, 0]), group("b", [1, 1]), group("c", [0, 1])], step=0)
    assert len(kept) == 2
    kept.add([group("d", [1, 0])], step=2)
    picked = {g.task.task_id for g in kept.pick(5, 3, busy=())}
    assert picked == {"c", "d"}  # b is flat, a made room
    assert [g.task.task_id for g in kept.pick(5, 3, busy={"d"})] == ["c"]
    restored = Replay(keep=2, age=3, seed=0)
    restored.load_state_dict(kept.state_dict())
    assert restored.pick(1, 3, ()) == kept.pick(1, 3, ())
    assert [g.task.task_id for g in kept.pick(5, 5, busy=())] == ["d"]


@pytest.mark.parametrize(
    "sections",
    [
        {"curriculum": {"max_resample_rounds": 3}},
        {"curriculum": {"replay": 2, "replay_age": 3}},
        {
            "curriculum": {
                "profile": 2,
                "band": [0.25, 1.0],
                "order": "easy_first",
                "rest_epochs": 1,
                "allocate": "vade",
                "allocate_options": {"group_size": 4},
                "candidates": "all",
            }
        },
    ],
    ids=["rounds", "replay", "profile-vade"],
)
def test_a_resumed_curriculum_goes_on_to_the_same_bits(tmp_path: Path, sections: Any) -> None:
    whole = trainer(tmp_path / "whole", **sections)
    whole.train()
    cut = trainer(tmp_path / "cut", **sections)
    while cut.step_number < 2:
        cut._write(cut.step())
    cut.save()
    cut._write(cut.step())  # lost with the process
    again = trainer(tmp_path / "cut", **sections)
    again.train()
    assert fingerprint(again) == fingerprint(whole)
    assert again.curriculum.state_dict() == whole.curriculum.state_dict()
    assert list(map(comparable, metrics(tmp_path / "cut"))) == list(
        map(comparable, metrics(tmp_path / "whole"))
    )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"curriculum": {"replay": 1}, "loss": {"name": "reinforce"}}, "has no ratio"),
        ({"curriculum": {"replay": 1}, "rollout": {"temperature": 0.8}}, "temperature 1"),
        ({"curriculum": {"order": "easy_first"}}, "needs curriculum.profile"),
        ({"curriculum": {"band": [0.9, 0.1]}}, "band"),
        ({"curriculum": {"candidates": "all"}}, "needs curriculum.allocate"),
        ({"multi_turn": {"calls": "native"}, "model": {"template": "plain"}}, "template 'chat'"),
        ({"multi_turn": {"tools": ["a:b"], "environment": "a:c"}}, "keep one of them"),
        (
            {"hints": {"name": "bread"}, "multi_turn": {"environment": "a:b"}},
            r"\[hints\] name 'bread' with \[multi_turn\]",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_named(
    sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_mapping(sections)


class Wave(EvenTokens):
    """Groups of even-numbered tasks turn mixed, the others stay flat."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        flat = int(task.task_id[1:]) % 2
        return Score(1.0 if flat else float(rollout.sample_index % 2))


def practising(folder: Path, plan: Practice, **curriculum: Any) -> Trainer:
    config = tiny_config(folder, curriculum={"allocate": "practice", **curriculum})
    return Trainer(
        config, tiny_parts(), tiny_tasks(8), Wave(), parts=TrainerParts(allocate=plan)
    )  # fmt: skip


def test_practice_finishes_mixed_groups_where_they_began_and_stops_the_others(
    tmp_path: Path,
) -> None:
    made = practising(tmp_path, Practice(size=4, probe=2, hope=2.0))
    groups = {g.task.task_id: g for g in made.step().groups}
    for task_id, group in groups.items():
        assert len(group.rollouts) == (2 if int(task_id[1:]) % 2 else 4)
        assert [r.sample_index for r in group.rollouts] == list(range(len(group.rollouts)))
        assert len({r.rollout_id for r in group.rollouts}) == len(group.rollouts)
        assert len({r.seed for r in group.rollouts}) == len(group.rollouts)
    shares = [o.rewards for o in made.curriculum.history]
    assert sorted(len(r) for r in shares) == sorted(len(g.rollouts) for g in groups.values())


def test_what_stopped_groups_leave_goes_to_new_prompts_within_the_budget(tmp_path: Path) -> None:
    made = practising(tmp_path, Practice(size=4, probe=2, hope=2.0), candidates="all")
    steps = [{g.task.task_id: len(g.rollouts) for g in made.step().groups} for _ in range(3)]
    for sizes in steps:
        assert sum(sizes.values()) <= 12
        assert all(n == (2 if int(t[1:]) % 2 else 4) for t, n in sizes.items())
    assert len(steps[0]) == 4  # two flat ones were stopped, which paid for a fourth prompt
    assert all(not int(t[1:]) % 2 for t in steps[2])  # what was flat is not chosen again


def test_a_further_round_is_sized_by_what_a_mixed_group_cost(tmp_path: Path) -> None:
    budgets: list[int] = []

    class TwoMixed:
        """Probes every flat task and two of the others, which it finishes."""

        def __call__(
            self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
        ) -> list[int]:
            budgets.append(budget)
            even = [t.task_id for t in tasks if not int(t.task_id[1:]) % 2][:2]
            return [1 if int(t.task_id[1:]) % 2 or t.task_id in even else 0 for t in tasks]

        def grow(
            self,
            tasks: Sequence[Task],
            history: Sequence[RolloutGroup],
            groups: Sequence[RolloutGroup],
            sizes: Sequence[int],
            budget: int,
        ) -> list[int]:
            odd = [int(t.task_id[1:]) % 2 for t in tasks]
            return [4 if n and not flat else n for n, flat in zip(sizes, odd, strict=True)]

    config = tiny_config(tmp_path, curriculum={"max_resample_rounds": 2, "candidates": "all",
                                               "allocate": "practice"})  # fmt: skip
    made = Trainer(
        config, tiny_parts(), tiny_tasks(8), Wave(), parts=TrainerParts(allocate=TwoMixed())
    )
    figures = made.step().figures
    # 4 × 1 + 2 × 4 rollouts, three groups' worth, gave two mixed groups: one more costs 1.5 groups
    assert budgets == [12, 8] and figures["groups_rolled"] == 8
    assert figures["rollouts"] == 20


def test_scores_that_depend_on_siblings_do_not_go_with_growing_groups(tmp_path: Path) -> None:
    class Ranked(EvenTokens):
        async def score_group(self, rollouts: Sequence[Rollout], task: Task) -> list[Score]:
            return [Score(0.0) for _ in rollouts]

    assert isinstance(Ranked(), GroupVerifier)
    with pytest.raises(ConfigError, match="lets groups grow"):
        Trainer(
            tiny_config(tmp_path), tiny_parts(), tiny_tasks(4), Ranked(),
            parts=TrainerParts(allocate=Practice(size=4, probe=2)),
        )  # fmt: skip
