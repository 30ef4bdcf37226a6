"""Turns, lines, spans and clip widths reach losses and credit in a real step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.rl.formulas.test_through_config import Judge, settings, tasks
from tests.rl.test_trainer import fingerprint
from tests.rl.tiny import CharTokenizer, EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.errors import ConfigError
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.formulas.credit import CREDIT
from tfgrpo.rl.rollouts.step_groups import StepGroups
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rl.update.accumulate import score_rows
from tfgrpo.rl.update.token_marks import before_first, lines_of
from tfgrpo.rl.update.train_rows import graded_of
from tfgrpo.rollout import Rollout, Score, Task

LINE = "M"


class Lines(EvenTokens):
    """A part a line: 1 where the line's first letter is even."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        lines = rollout.answer.split(LINE)
        parts = {f"step_{i}": float(line[:1] > "a") for i, line in enumerate(lines)}
        return Score(float(len(lines) % 2), parts=parts)


def lined(folder: Path, **sections: Any) -> Trainer:
    config = tiny_config(
        folder,
        verifier={"kind": "function", "function": "a:b"},
        credit={"name": "rank_grpo", "separator": LINE},
        loss={"name": "segment_clip"},
        optimiser={"epochs_per_batch": 2, "steps": 4},
        **sections,
    )
    return Trainer(config, tiny_parts(), tiny_tasks(), Lines())


def rolled(trainer: Trainer) -> StepGroups:
    return trainer._roller.roll(0)


def test_lines_of_a_reply_are_steps_with_rewards_and_segments(tmp_path: Path) -> None:
    trainer = lined(tmp_path)
    made = rolled(trainer).groups
    rows, _ = trainer._row_maker.rows(made, 0)
    text_of = CharTokenizer().decode
    several = 0
    for row, graded in zip(rows, graded_of(made), strict=True):
        lines = lines_of(graded.token_ids, text_of, LINE)
        several += max(lines) > 0
        assert row.columns["segment"] == tuple(map(float, lines))
        assert isinstance(row.advantage, tuple) and len(row.advantage) == len(lines)
        for line in set(lines):  # one advantage a line
            assert len({a for a, n in zip(row.advantage, lines, strict=True) if n == line}) == 1
    assert several
    assert np.isfinite(trainer.step().figures["grad_norm"])


def test_a_resumed_run_with_lines_and_columns_is_bit_equal(tmp_path: Path) -> None:
    whole = lined(tmp_path / "whole")
    whole.train()
    half = lined(tmp_path / "half")
    for _ in range(2):
        half.step()
    half.save()
    again = lined(tmp_path / "half")
    again.train()
    assert fingerprint(again) == fingerprint(whole)


def test_widths_of_turns_reach_the_loss(tmp_path: Path) -> None:
    sections = settings("credit", CREDIT["a2tgpo"], tmp_path)
    sections["credit"]["options"] = {"widen": 0.5}
    trainer = Trainer(tiny_config(tmp_path, **sections), tiny_parts(), tasks(), Judge())
    rows, _ = trainer._row_maker.rows(rolled(trainer).groups, 0)
    widths = [w for row in rows for w in row.columns["width"]]
    assert all(0.5 < w < 1.5 for w in widths) and len(set(widths)) > 2
    assert [len(r.columns["width"]) for r in rows] == [r.row.n_loss for r in rows]


def test_confidence_of_a_prompt_is_of_its_least_likely_tokens(tmp_path: Path) -> None:
    loss = {"advantage": "progrpo", "advantage_options": {"share": 1.0}}
    config = tiny_config(tmp_path, loss=loss)
    trainer = Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens())
    graded = graded_of(rolled(trainer).groups)
    found = trainer._row_maker._prompt_confidence(graded)
    prompt = graded[0].row.prompt_ids
    row = type(graded[0].row)(0, prompt[:1], prompt[1:])
    (logp,) = score_rows(trainer._model.decoder, [row], temperature=1.0, max_tokens=4000).values()
    assert found[prompt] == pytest.approx(np.exp(np.mean(logp)))
    assert np.isfinite(trainer.step().figures["grad_norm"])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"loss": {"name": "llds", "options": {"gate": "turn"}}}, "for rollouts of several turns"),
        ({"loss": {"name": "llds", "options": {"lam_last": 0.1}}}, "for rollouts of several turns"),
        (
            {
                "loss": {"name": "cispo"},
                "credit": {"name": "a2tgpo", "options": {"widen": 0.5}},
                "multi_turn": {"environment": "a:b"},
            },
            "which loss 'cispo' cannot: choose one of clip, dapo",
        ),
        (
            {"credit": {"name": "rank_grpo", "separator": "\n"}, "multi_turn": {"tools": ["a:b"]}},
            "gives steps already",
        ),
        ({"credit": {"name": "rank_grpo", "separator": "\n"}}, "step_rewards"),
        ({"credit": {"name": "call_entropy"}}, "credit.phrases"),
    ],
)
def test_spans_that_nothing_gives_are_refused(sections: dict[str, Any], message: str) -> None:
    judged = {"verifier": {"kind": "function", "function": "a:b"}}
    if message == "step_rewards":
        judged = {}
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_mapping(judged | sections)


def test_marks_of_tokens() -> None:
    assert lines_of([5, 6], lambda ids: "ab" if ids == [5] else "cd", "bc") == (0, 0)
    assert lines_of([5, 6, 5], lambda ids: "ab" if ids == [5] else "cd", "bc") == (0, 0, 1)
    assert before_first([0, 0, 0], [0, 1, 1]) == (0.0, 0.0, 0.0)
