"""Whole runs of the flow `reflect`: later passes, early ends, modes, crashes between stages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.learning.worlds import HELPFUL, Killed, World, journal, settings
from tfgrpo.errors import ConfigError
from tfgrpo.learning.learn import learn
from tfgrpo.lm.scripted import Reply
from tfgrpo.protocols import Request
from tfgrpo.store import Journal


def test_practice_ends_early_where_the_gate_leaves_nothing_to_gain(tmp_path: Path) -> None:
    class Perfect(World):
        def _policy(self, request: Request, seed: int | None) -> Reply:
            reply = super()._policy(request, seed)
            text = "\n".join(m.content for m in request.messages)
            last = request.messages[-1].content
            task = next(t for t in self.tasks if str(t.prompt) in last)
            return str(task.reference) if HELPFUL in text else reply

    world = Perfect()
    result = world.learn(settings(tmp_path, learn={"epochs": 3}))
    assert result.exit_code == 0 and "nothing left to gain" in result.learned.stopped_by
    assert world.stages["practice"] == 24, "one batch of six tasks, four draws each"
    assert world.stages["test"] == 96, "the proof is made all the same"


def test_later_passes_practise_what_still_fails(tmp_path: Path) -> None:
    hard = {f"t{i:02d}" for i in range(0, 36, 3)}

    def answer(request: Request, seed: int | None) -> Reply:
        last = request.messages[-1].content
        task = next(t for t in world.tasks if str(t.prompt) in last)
        text = "\n".join(m.content for m in request.messages)
        known = HELPFUL in text and task.task_id not in hard
        return str(task.reference) if known else "no idea"

    world = World(answer=answer)
    config = settings(
        tmp_path, learn={"epochs": 2, "batch": 24, "keep_share": 1.0},
        tasks={"practice": 20, "gate": 8, "test": 8},
    )  # fmt: skip
    result = world.learn(config)
    practised = set(result.splits.to_dict()["practice"])
    with journal(tmp_path) as store:
        groups = [g for g in store.groups("practice") if g.metadata["epoch"] == 1]
        replayed = [g for g in store.groups("replay") if g.task.task_id in hard]
    by_chance = [g for g in groups if not g.metadata.get("focused")]
    assert len(by_chance) == 4, "a fifth of twenty"
    assert {g.task.task_id for g in groups} <= practised
    assert bool(replayed) == any(g.metadata.get("focused") for g in groups)
    assert all(g.context.parts for g in groups), "the second pass practises under the library"


def test_practice_may_draw_otherwise_than_evaluation(tmp_path: Path) -> None:
    seen: dict[str, set[float | None]] = {}

    class Watched(World):
        def _policy(self, request: Request, seed: int | None) -> Reply:
            from tfgrpo.runtime.call_scope import current_scope

            seen.setdefault(current_scope().stage, set()).add(request.sampling.temperature)
            return super()._policy(request, seed)

    world = Watched()
    config = settings(tmp_path, practice={"sampling": {"temperature": 1.1}})
    world.learn(config)
    assert seen["practice"] == seen["replay"] == {1.1}
    assert seen["gate"] == seen["test"] == {0.7}
    with pytest.raises(ConfigError, match=r"practice\.sampling"):
        learn(
            config.model_copy(
                update={"run": config.run.model_copy(update={"folder": str(tmp_path / "other")})}
            ),
            tasks=world.tasks,
            opener=world.opener,
            policy=object(),
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["critic", "majority"])
def test_without_a_verifier_nothing_is_gated_or_proven_and_it_is_said(
    tmp_path: Path, by: str
) -> None:
    world = World()
    config = settings(tmp_path).model_copy(update={"verifier": {"kind": "none", "by": by}})
    result = world.learn(config)
    assert [e.text for e in result.library.shown] == [HELPFUL]
    assert world.stages["gate"] == world.stages["test"] == 0
    assert result.verdict is None and result.learned.proof is None
    assert any("unverified" in note for note in result.notes)
    assert "unproven" in result.learned.choice.reason
    with journal(tmp_path) as store:
        assert all(r.outcome == "ungraded" for g in store.groups() for r in g.rollouts)


def test_a_verifier_of_kind_none_knows_no_other_keys(tmp_path: Path) -> None:
    config = settings(tmp_path).model_copy(update={"verifier": {"kind": "none", "by": "vote"}})
    with pytest.raises(ConfigError, match="majority"):
        World().learn(config)


@pytest.mark.parametrize("stage", ["practice", "panel", "revise", "replay", "gate"])
def test_a_kill_in_any_stage_pays_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The rule that turns nothing goes back to its critic, so all stages occur."""

    def stubborn() -> World:
        return World(lesson="When in doubt, breathe slowly and count to ten.", base=0.3)

    sections: dict[str, Any] = {"learn": {"batch": 12}}
    fresh = stubborn()
    whole = fresh.learn(settings(tmp_path / "whole", **sections))
    assert {"practice", "panel", "replay", "gate"} <= fresh.stages.keys()
    if stage not in fresh.stages:
        pytest.skip("every rule turned a task in this world")
    order = [s for s, _ in fresh.asked]
    world = stubborn()
    world.fail_at = order.index(stage) + 1
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "close", Journal.abandon)
        with pytest.raises((Killed, BaseExceptionGroup)):
            world.learn(settings(tmp_path, **sections))
    world.fail_at = 0
    result = world.learn(settings(tmp_path, **sections))
    assert result.learned.choice == whole.learned.choice
    assert result.library.version_id == whole.library.version_id
    assert set(world.draws) == set(fresh.draws)
    again = Counter({d: n for d, n in world.draws.items() if n > 1})
    assert len(again) <= 4, "at most what was in flight"


def test_the_published_presets_carry_their_own_sizes() -> None:
    from tfgrpo.config.learn import Config

    paper = Config.from_mapping({"learn": {"preset": "paper-main"}})
    sizes = (paper.learn.epochs, paper.learn.batch, paper.learn.group_size, paper.gate.enabled)
    assert sizes == (3, 64, 5, False)
    own = Config.from_mapping({"learn": {"preset": "paper-preview", "epochs": 1}})
    assert (own.learn.epochs, own.learn.batch, own.gate.enabled) == (1, 100, False)
    old = Config.from_mapping({"learn": {"preset": "contrast"}})
    assert (old.learn.epochs, old.learn.batch, old.learn.group_size) == (1, 16, 8)
