"""The schedulers in the real trainer on a tiny random model: steps, state and resume."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.rl.hints import make_scheduler
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rollout import Task

SECTIONS = [
    {"name": "sage", "max_level": 2, "success_above": 0.9},
    {"name": "sage_light", "success_above": 0.9},
    {"name": "pope", "success_above": 0.9, "max_level": 2, "instruct": False},
    {"name": "questa", "epochs": [1]},
    {"name": "sage", "max_level": 2, "success_above": 0.9, "ahead": True},
    {"name": "scaf", "success_above": 0.7},
    {"name": "adhint"},
    {"name": "stephint"},
    {"name": "bread", "success_above": 0.7},
]
MIXED = {"scaf", "adhint", "stephint"}
"""Methods whose groups hold several contexts by definition."""


def trainer_of(folder: Path, section: dict[str, object]) -> Trainer:
    tasks = [
        Task(
            f"t{i}",
            f"task {chr(97 + i)}",
            metadata={"hints": ["one", "two", "three"], "solution": "a b c d e f g h"},
        )
        for i in range(6)
    ]
    config = tiny_config(folder, optimiser={"lr": 1e-3})
    return Trainer(config, tiny_parts(), tasks, EvenTokens(), hints=make_scheduler(section))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s["name"])
def test_training_goes_on_after_a_stop_with_the_same_hints(
    tmp_path: Path, section: dict[str, object]
) -> None:
    def seen(trainer: Trainer, n: int) -> list[dict[str, object]]:
        made = []
        for _ in range(n):
            report = trainer.step()
            assert math.isfinite(report.figures["loss"])
            for group in report.groups:
                prompts = {r.steps[0].prompt_token_ids for r in group.rollouts}
                assert len(prompts) == 1 or group.metadata["hint"] == "mixed"
                assert len(prompts) == 1 or section["name"] in MIXED
                made.append(group.to_dict())
        return made

    whole = trainer_of(tmp_path / "whole", section)
    expected = seen(whole, 4)
    first = trainer_of(tmp_path / "cut", section)
    assert seen(first, 2) == expected[:6]
    first.save()
    second = trainer_of(tmp_path / "cut", section)
    assert second.resume()
    assert seen(second, 2) == expected[6:]
    assert second._hints is not None
    assert whole._hints is not None
    assert second._hints.state_dict() == whole._hints.state_dict()
    assert "'prefix_tokens':" in str(expected) or "'label':" in str(expected), "nothing was hinted"


def test_a_generator_that_another_trainer_used_makes_the_same_groups(tmp_path: Path) -> None:
    parts = tiny_parts()
    config = tiny_config(tmp_path, optimiser={"lr": 0.01})
    first = Trainer(config, parts, tiny_tasks(), EvenTokens())
    used = first.generator
    first._roller.roll(3)  # its cache and state are no longer fresh
    del first
    again = Trainer(config, parts, tiny_tasks(), EvenTokens(), sampler=used)
    assert again.generator is used
    fresh = Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens())
    for _ in range(2):
        want, got = fresh.step(), again.step()
        assert [g.to_dict() for g in got.groups] == [g.to_dict() for g in want.groups]
