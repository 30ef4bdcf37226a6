"""A step that is sampled while the one before is trained: order, ratios, resuming, breaking off."""

from __future__ import annotations

import math
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.rl.beside import AHEAD, Engine
from tests.rl.rollouts.test_multi_turn import SECTIONS
from tests.rl.test_trainer import OneHint, comparable, fingerprint, metrics
from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.errors import ConfigError, ProviderError, StoreError
from tfgrpo.rl import distributed
from tfgrpo.rl.checkpoints import files as checkpoint
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.formulas.inputs import TokenBatch
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.trainer import Trainer, TrainerParts
from tfgrpo.rollout import Score


def make(folder: Path, generator: Any = None, hints: Any = None, **sections: Any) -> Trainer:
    config = tiny_config(folder, **{"engine": AHEAD, **sections})
    parts = TrainerParts(generator=generator or Engine())
    return Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens(), hints=hints, parts=parts)


def sampled(trainer: Trainer, step: int) -> list[tuple[int, ...]]:
    groups = trainer._rolls.take(step).groups.groups
    return [r.steps[0].token_ids or () for g in groups for r in g.rollouts]


REPLAY = {"replay": 1, "rest_epochs": 1, "band": [0.1, 0.9]}


@pytest.mark.parametrize("sections", [{}, {"curriculum": REPLAY}], ids=["plain", "replay"])
def test_training_is_that_of_rolling_first_and_updating_then(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    """Against a loop by hand on one thread: roll step k+1, update with step k, hand over."""
    trainer = make(tmp_path / "ahead", **sections)
    trainer.train()
    engine = Engine()
    hand = make(tmp_path / "hand", engine, **sections)
    hand.updater.sync()
    weights, groups = 0, hand._roller.roll(0, 0)
    for step in range(4):
        following = hand._roller.roll(step + 1, weights) if step < 3 else groups
        old = {
            r.rollout_id
            for g in groups.groups
            for r in g.rollouts
            if r.metadata["weights"] < weights or r.rollout_id in groups.replayed
        }
        rows, stale = hand._row_maker.rows(groups.groups, step, replayed=old)
        assert len(stale) == len(rows) or step == 0
        weights += bool(hand.updater.update(rows, step, stale).norms)
        hand.updater.sync()
        groups = following
    assert weights == 4 and fingerprint(hand) == fingerprint(trainer)


def test_without_staleness_a_step_is_rolled_trained_and_handed_over_in_turn(tmp_path: Path) -> None:
    engine = Engine()
    trainer = make(tmp_path / "now", engine, engine={"kind": "vllm-server"})
    trainer.train()
    assert engine.told == ["sync", *["begin", "end", "sync"] * 4]
    own = Trainer(tiny_config(tmp_path / "own"), tiny_parts(), tiny_tasks(), EvenTokens())
    own.train()
    assert fingerprint(own) == fingerprint(trainer)
    assert not {"staleness", "waited_seconds"} & metrics(tmp_path / "now")[0].keys()


def test_two_runs_are_equal_and_weights_are_handed_over_between_rollouts(tmp_path: Path) -> None:
    engine = Engine()
    first, second = make(tmp_path / "a", engine), make(tmp_path / "b")
    first.train()
    second.train()
    assert fingerprint(first) == fingerprint(second)
    assert list(map(comparable, metrics(tmp_path / "a"))) == [
        comparable(row) for row in metrics(tmp_path / "b")
    ]
    # step 0, then each further step beside an update, then new weights and their check
    rolled, handed = ["begin", "end"], ["sync", "begin", "end"]
    assert engine.told == ["sync", *rolled, *[*rolled, *handed] * 3, *handed]
    rows = metrics(tmp_path / "a")
    assert [row["staleness"] for row in rows] == [0, 1, 1, 1]
    assert all(row["dropped_stale"] == 0 and row["mismatch_mean"] < 1e-5 for row in rows)
    assert all(0 <= row["waited_seconds"] <= row["seconds"] for row in rows)
    assert all(row["rollout_seconds"] > 0 and row["update_seconds"] > 0 for row in rows)


def test_no_process_hands_weights_over_before_all_have_drawn(tmp_path: Path, monkeypatch) -> None:
    """Greedy baselines are drawn last; the processes meet once more after them."""
    engine = Engine()

    def gathered(value: Any) -> list[Any]:
        if threading.current_thread() is not threading.main_thread():
            engine.told.append("met")
        return [value]

    monkeypatch.setattr(distributed, "gather_objects", gathered)
    make(tmp_path, engine, loss={"advantage": "remax"}).train()
    before = [engine.told[i - 1] for i, told in enumerate(engine.told) if told == "sync" and i]
    assert before == ["met"] * 3 + ["end"]  # nothing is drawn beside the last step


@pytest.mark.parametrize("kind", ["plain", "hints", "turns"])
@pytest.mark.parametrize("done", [1, 3])
def test_a_resumed_run_is_bit_equal_and_draws_nothing_again(
    tmp_path: Path, done: int, kind: str
) -> None:
    def hints() -> Any:
        return OneHint() if kind == "hints" else None

    curriculum = {"curriculum": {"rest_epochs": 1, "max_resample_rounds": 2, "replay": 1}}
    curriculum |= SECTIONS if kind == "turns" else {}
    whole = make(tmp_path / "whole", hints=hints(), **curriculum)
    whole.train()
    first = make(tmp_path / "cut", hints=hints(), **curriculum)
    first.updater.sync()
    for _ in range(done):
        first._write(first.step())
    first.save()
    first._write(first.step())  # a step that is lost with the process
    engine = Engine()
    second = make(tmp_path / "cut", engine, hints=hints(), **curriculum)
    second.train()
    assert fingerprint(second) == fingerprint(whole)
    assert list(map(comparable, metrics(tmp_path / "cut"))) == [
        comparable(row) for row in metrics(tmp_path / "whole")
    ]
    if done == 3:  # the last step's groups were drawn before: only its check is left to draw
        assert engine.told == ["sync", "sync", "begin", "end"]


def test_older_groups_than_allowed_are_dropped_and_counted(tmp_path: Path) -> None:
    first = make(tmp_path)
    first.updater.sync()
    first.step()
    first.save()
    drawn = sampled(first, 1)
    second = make(tmp_path, engine={"kind": "vllm-server"})
    assert second.resume()
    second.updater.sync()
    report = second.step()
    assert report.figures["dropped_stale"] == 3 and report.figures["staleness"] == 0
    assert [r.steps[0].token_ids for g in report.groups for r in g.rollouts] != drawn
    assert "dropped_stale" not in second.step().figures


class Recorded:
    """What a loss is given, by step."""

    def __init__(self, monkeypatch: Any, name: str) -> None:
        self.batches: list[TokenBatch] = []
        entry = LOSSES[name]

        def fn(batch: TokenBatch, **options: Any) -> torch.Tensor:
            self.batches.append(batch)
            loss: torch.Tensor = entry.fn(batch, **options)
            return loss

        monkeypatch.setitem(LOSSES, name, replace(entry, fn=fn))


@pytest.mark.parametrize("name", ["clip", "decoupled_clip"])
def test_a_stale_row_is_weighed_by_its_sampler(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    """By hand: exp(log π now − log π of the sampler), for each sampled token of the step."""
    trainer = make(
        tmp_path, loss={"name": name}, optimiser={"micro_batch_tokens": 4096, "lr": 3e-2}
    )
    trainer.updater.sync()
    trainer.step()
    rows, _ = trainer._row_maker.rows(trainer._rolls._drawn.groups.groups, 1)
    now = trainer.updater.score(rows)
    seen = Recorded(monkeypatch, name)
    trainer.step()
    wanted = [
        math.exp(p - q)
        for r in rows
        if r.advantage
        for p, q in zip(now[r.row.index], r.engine_logp, strict=True)
    ]
    behaviour = "behaviour_logp_D" if name == "decoupled_clip" else "old_logp_D"
    found = [x for b in seen.batches for x in (b.logp_D - getattr(b, behaviour)).exp().tolist()]
    assert sorted(found) == pytest.approx(sorted(wanted), rel=1e-4)
    assert max(abs(x - 1) for x in found) > 0.01
    if name == "decoupled_clip":
        for b in seen.batches:
            torch.testing.assert_close(b.old_logp_D, b.logp_D.detach())


class Failing(Engine):
    """Fails in the rollouts of its second step."""

    def generate(self, *args: Any) -> Any:
        if len(self.told) == 3:
            raise ProviderError("gone", kind="connection")
        return super().generate(*args)


def test_an_error_of_the_rollouts_is_raised_in_the_step_and_nothing_is_saved(
    tmp_path: Path,
) -> None:
    trainer = make(tmp_path, Failing(), run={"save_every": 1})
    with pytest.raises(ProviderError, match="gone"):
        trainer.train()
    assert checkpoint.found(tmp_path / "checkpoints") == []
    for go_on in (trainer.save, trainer.step):
        with pytest.raises(StoreError, match="resume from its last checkpoint"):
            go_on()


class Held(Engine):
    """Holds the rollouts of the second step until it is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held, self.is_stopped = threading.Event(), threading.Event()

    def stop(self) -> None:
        self.is_stopped.set()

    def generate(self, *args: Any) -> Any:
        if len(self.told) != 3:
            return super().generate(*args)
        self.is_held.set()
        assert self.is_stopped.wait(PATIENCE_S)
        self.told.append("stopped")
        raise ProviderError("stopped", kind="refused")


def test_an_interrupt_in_the_update_stops_the_rollouts_too(
    tmp_path: Path, monkeypatch: Any
) -> None:
    engine = Held()
    trainer = make(tmp_path, engine)

    def interrupted(*_: Any) -> None:
        assert engine.is_held.wait(PATIENCE_S)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(trainer.updater, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert engine.told[-1] == "stopped" and checkpoint.found(tmp_path / "checkpoints") == []


def test_an_interrupt_while_an_update_waits_stops_the_rollouts(
    tmp_path: Path, monkeypatch: Any
) -> None:
    engine = Held()
    trainer = make(tmp_path, engine)
    waited_for = trainer._rolls._waited_for

    def interrupted(future: Any) -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return waited_for(future)

    monkeypatch.setattr(trainer._rolls, "_waited_for", interrupted)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    signal.signal(signal.SIGALRM, before)
    assert engine.told[-1] == "stopped"


class Forgetful(Engine):
    """Takes the starting weights and no others."""

    def sync(self, named_params: Any) -> None:
        if not self.told:
            super().sync(named_params)


def test_an_engine_that_keeps_old_weights_is_found_at_the_first_hand_over(tmp_path: Path) -> None:
    trainer = make(tmp_path, Forgetful(), rollout={"mismatch_mean": 1e-3})
    with pytest.raises(ConfigError, match=r"step 1: the engine's log-probs differ"):
        trainer.train()


def test_the_first_step_is_fresh_and_passes_the_gate(tmp_path: Path) -> None:
    trainer = make(tmp_path, rollout={"mismatch_mean": 1e-3})
    trainer._engine._decoder.embed.data.mul_(1.5)  # and step 0 is rolled without a hand-over
    with pytest.raises(ConfigError, match=r"step 1: the engine's log-probs differ"):
        trainer.step()


class Even(EvenTokens):
    async def score(self, rollout: Any, task: Any) -> Score:
        return Score(1.0)


def test_rollouts_are_fresh_where_the_update_beside_them_moved_nothing(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer._maker.grader = replace(trainer._maker.grader, verifier=Even())
    trainer.updater.sync()
    assert [trainer.step().figures["staleness"] for _ in range(3)] == [0, 0, 0]
    assert trainer._rolls.weights == 0


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"engine": {"max_staleness": 1}}, r"engine\.kind 'own'.*engine\.kind = 'vllm-server'"),
        ({"engine": {"kind": "vllm", "max_staleness": 1}}, r"engine\.kind 'vllm'"),
        ({"engine": AHEAD, "loss": {"name": "reinforce"}}, "has no ratio"),
        ({"engine": AHEAD, "rollout": {"temperature": 0.7}}, "temperature 1 only"),
        ({"engine": AHEAD, "rollout": {"strategy": "latr"}}, "looks at the trained weights"),
        ({"engine": AHEAD, "tasks": {"groups": "x.jsonl"}}, r"tasks\.groups with engine\.max_st"),
        ({"engine": {"base_urls": ["http://a/v1"]}}, r"engine\.base_urls with engine\.kind 'own'"),
        (
            {"engine": {**AHEAD, "base_url": "http://a", "base_urls": ["http://b"]}},
            "are both set",
        ),
        ({"engine": {**AHEAD, "base_urls": ["http://a", "http://a"]}}, "names a server twice"),
    ],
)
def test_what_contradicts_sampling_ahead_is_refused(sections: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TrainConfig.from_mapping(sections)


def test_sampling_ahead_needs_an_engine_beside_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TrainerParts\(generator=…\)"):
        Trainer(tiny_config(tmp_path, engine=AHEAD), tiny_parts(), tiny_tasks(), EvenTokens())
