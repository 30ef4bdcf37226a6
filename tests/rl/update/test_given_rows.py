"""References as members of their groups: their rows, their advantages, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.errors import ConfigError
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rl.update.given_rows import reference_text
from tfgrpo.rollout import Rollout, Score, Task


class Wrong(EvenTokens):
    """Nothing that is drawn is right."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        return Score(0.0)


def tasks(**fields: Any) -> list[Task]:
    return [Task(t.task_id, t.prompt, **fields) for t in tiny_tasks()]


def trainer(folder: Path, given: list[Task]) -> Trainer:
    config = tiny_config(folder, loss={"name": "grao"})
    return Trainer(config, tiny_parts(), given, Wrong())


def test_an_all_wrong_group_learns_from_its_reference(tmp_path: Path) -> None:
    run = trainer(tmp_path, tasks(reference="abc"))
    groups = run._roller.roll(0).groups
    rows, _ = run._row_maker.rows(groups, 0)
    for number, group in enumerate(groups):
        *drawn, last = [r for r in rows if r.group == number]
        assert len(drawn) == len(group.graded)
        assert not any("given" in r.columns for r in drawn)
        # the tokens of "abc" and the end of a reply, under the group's prompt
        assert last.row.suffix_ids == (39, 40, 41, 2)
        assert last.row.prompt_ids == drawn[0].row.prompt_ids
        assert last.columns["given"] == (1.0,) * 4 and last.engine_logp is None
        assert last.reward == 1.0 and last.advantage > 0 > drawn[0].advantage
    figures = run.step().figures
    assert figures["grad_norm"] > 0 and figures["rows"] == len(rows)


def test_the_reference_becomes_likelier(tmp_path: Path) -> None:
    run = trainer(tmp_path, tasks(reference="abc"))
    rows, _ = run._row_maker.rows(run._roller.roll(0).groups, 0)
    row = [r for r in rows if "given" in r.columns][:1]
    before = sum(run.updater.score(row)[row[0].row.index])
    for _ in range(3):
        run.step()
    assert sum(run.updater.score(row)[row[0].row.index]) > before


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"reference": " 42 "}, "42"),
        ({"reference": 7}, "7"),
        ({"reference": ["a", "b"], "metadata": {"solution": "first a"}}, "first a"),
    ],
)
def test_a_worked_solution_comes_before_the_bare_answer(fields: dict[str, Any], text: str) -> None:
    assert reference_text(Task("t", "q", **fields)) == text


@pytest.mark.parametrize("fields", [{}, {"reference": ["a"]}, {"reference": True}])
def test_a_task_without_an_answer_to_imitate_is_refused_before_the_run(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"task '.*' has no answer to imitate: give it"):
        trainer(tmp_path, tasks(**fields))


def test_a_reference_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its prompt and reference have .* context 128"):
        trainer(tmp_path, tasks(reference="a" * 200)).step()


def test_a_reference_needs_replies_of_one_turn_to_the_bare_prompt() -> None:
    for section in ({"multi_turn": {"environment": "a:B"}}, {"hints": {"name": "sage"}}):
        with pytest.raises(ConfigError, match=r"loss 'grao' needs given, .* leave \[multi_turn\]"):
            TrainConfig.from_mapping({"loss": {"name": "grao"}, **section})
