"""Saved groups, a search's among them, as a training run's rollouts and as rows to distil."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.cli.test_train import write_model
from tests.rl.rollouts.test_multi_turn import END, ChatTokenizer
from tests.rl.tiny import EvenTokens, tiny_config
from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message, ToolCall
from tfgrpo.rl.checkpoints.loaded_model import load_parts
from tfgrpo.rl.distillation.rows import rows_of_groups
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.turn_tools import TurnText
from tfgrpo.rl.saved_groups import Reading, SavedGroups, with_tokens
from tfgrpo.rl.trainer import Trainer, TrainerParts
from tfgrpo.rl.training import saved_groups, train
from tfgrpo.rl.update.rollout_rows import row_of
from tfgrpo.rl.update.row_features import state_keys
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task
from tfgrpo.store import write_groups

TASK = Task("t", "2 + 3?", reference="5")


def call(name: str, arguments: str = '{"a": 2}') -> Message:
    return Message("assistant", "", (ToolCall("c", name, arguments),))


def said(text: str, told: str = "") -> tuple[Message, str]:
    return Message("assistant", text), told


def path(
    number: int, nodes: list[int], reward: float | None, *turns: tuple[Message, str]
) -> Rollout:
    """A finished path of a search: its turns without token ids, and its nodes."""
    steps = tuple(Step(action, (Message("tool", told),) if told else ()) for action, told in turns)
    rollout = Rollout(f"r{number}", "t", steps, sample_index=number, metadata={"node_path": nodes})
    return (
        rollout.failed("verifier_failed", "x") if reward is None else rollout.graded(Score(reward))
    )


def tree() -> RolloutGroup:
    """Two paths that share their first call, one that does not, one without a score."""
    first, second = (call("look"), "door"), (Message("assistant", "open it"), "")
    return RolloutGroup(
        "g",
        TASK,
        (
            path(0, [0, 1, 2], 1.0, first, second),
            path(1, [0, 1, 3], 0.0, first, (Message("assistant", "leave"), "")),
            path(2, [0, 4, 5], 0.0, (call("wait"), "nothing"), second),
            path(3, [0, 6], None, second),
        ),
    )


def reading(tokenizer: Any = None) -> tuple[Prompter, Reading]:
    tokenizer = tokenizer or ChatTokenizer()
    turns = TurnText(tokenizer, template="chat", eos_ids=(2,))
    return Prompter(tokenizer, context_tokens=500), Reading(tokenizer, turns, 2)


def test_a_path_is_one_growing_sequence_of_which_its_turns_bear_a_loss() -> None:
    prompter, how = reading()
    rollout = with_tokens(tree().rollouts[0], prompter.ids(TASK), how)
    row = row_of(rollout, index=0)
    text = ChatTokenizer().decode([*row.prompt_ids, *row.suffix_ids])
    said = 'Action: look {"a": 2}'
    assert text == (
        f"[user]2 + 3?{END}\n[assistant]{said}{END}\n[user]Observation: door{END}\n"
        f"[assistant]open it{END}"
    )
    sampled = [row.suffix_ids[i] for i in row.loss_positions or ()]
    assert ChatTokenizer().decode(sampled) == f"{said}{END}open it{END}"
    assert all(s.logprobs is None for s in rollout.steps)


def test_the_nodes_of_a_search_are_the_states_of_its_paths() -> None:
    prompter, how = reading()
    saved = SavedGroups([tree()], prompter, how)
    (group,) = saved([TASK], 0)
    keys = [state_keys(r, by_history=True) for r in group.rollouts]
    assert keys == [("0", "1"), ("0", "1"), ("0", "4")] and saved.left_out == 1
    assert [g.task_id for g in saved.tasks] == ["t"]
    a, b = (r.steps for r in group.rollouts[:2])
    assert a[0].token_ids == b[0].token_ids and a[1].prompt_token_ids == b[1].prompt_token_ids


def test_own_token_ids_are_kept_where_they_are_one_sequence() -> None:
    prompter, how = reading()
    made = with_tokens(tree().rollouts[0], prompter.ids(TASK), how)
    own = replace(how, keeps_tokens=True)
    assert with_tokens(made, prompter.ids(TASK), own) is made
    torn = replace(made, steps=(made.steps[0], replace(made.steps[1], prompt_token_ids=(9, 9))))
    assert with_tokens(torn, prompter.ids(TASK), own).steps == made.steps  # tokenised again


def test_what_cannot_be_trained_on_is_left_out_or_named() -> None:
    prompter, how = reading()
    short = Prompter(ChatTokenizer(), context_tokens=60)
    assert SavedGroups([tree(), tree()], Prompter(ChatTokenizer(), context_tokens=90), how).left_out
    with pytest.raises(ConfigError, match="holds no graded rollout that fits"):
        SavedGroups([tree()], short, how)
    twice = Message("assistant", "", (ToolCall("a", "x", "{}"), ToolCall("b", "y", "{}")))
    both = RolloutGroup("g", TASK, (path(0, [0, 1], 1.0, (twice, "")),))
    with pytest.raises(ConfigError, match="has 2 tool calls"):
        SavedGroups([both], prompter, how)


def test_paths_of_several_turns_are_rows_to_distil() -> None:
    prompter, how = reading()
    rows = rows_of_groups(
        [tree()],
        prompter,
        keep=lambda r: r.reward == 1.0,
        source="search",
        end_id=2,
        own_tokens=False,
        turns=how.turns,
    )
    assert len(rows) == 1
    row = rows[0].row
    want = row_of(with_tokens(tree().rollouts[0], prompter.ids(TASK), how), index=0)
    assert row == want and row.n_loss < len(row.suffix_ids)


@pytest.mark.parametrize("credit", ["spo_tree", "portool", "branch_grpo"])
def test_a_searchs_tree_trains_with_the_credits_of_trees(credit: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    groups = [
        RolloutGroup(
            f"g{i}",
            task := Task(f"t{i}", "abc"),
            tuple(
                replace(r, task_id=task.task_id)
                for r in (
                    path(0, [0, 1, 2], 1.0, said("ab", "x"), said("ef")),
                    path(1, [0, 1, 3], 0.0, said("ab", "x"), said("gh")),
                    path(2, [0, 4, 5], 0.0, said("cd", "y"), said("ij")),
                )
            ),
        )
        for i in range(3)
    ]
    write_groups(tmp_path / "groups.jsonl", groups)
    config = tiny_config(
        tmp_path / "run",
        model={"lm": f"local:{tmp_path / 'model'}"},
        tasks={"groups": str(tmp_path / "groups.jsonl")},
        credit={"name": credit},
        optimiser={"steps": 2, "lr": 1e-3, "micro_batch_tokens": 4000},
    )
    seen: list[dict[str, Any]] = []
    result = train(config, verifier=EvenTokens(), on_step=lambda r: seen.append(r.figures))
    assert result.steps == 2 and all(f["grad_norm"] > 0 for f in seen)
    assert all(f["rollouts"] == 0 and f["decode_steps"] == 0 for f in seen)  # nothing is sampled
    parts = load_parts(config.model.lm)
    saved = saved_groups(config, parts)
    trainer = Trainer(
        config, parts, saved.tasks, EvenTokens(), parts=TrainerParts(make_groups=saved)
    )
    rows, _ = trainer._row_maker.rows(saved(saved.tasks, 0), 0)
    for a, b in itertools.pairwise(rows[:2]):  # the shared turn has one advantage in both
        assert isinstance(a.advantage, tuple) and isinstance(b.advantage, tuple)
        shared = 3  # two letters and the end of the turn
        assert credit == "portool" or a.advantage[:shared] == b.advantage[:shared]


@pytest.mark.parametrize(
    "sections",
    [
        {"tasks": {"groups": "g", "path": "p"}},
        {"tasks": {"groups": "g"}, "hints": {"name": "sage"}},
        {"tasks": {"groups": "g"}, "curriculum": {"allocate": "top_up"}},
        {"tasks": {"groups": "g"}, "curriculum": {"profile": 2}},
        {"tasks": {"groups": "g"}, "rollout": {"strategy": "latr"}},
    ],
)
def test_saved_groups_are_refused_with_what_needs_sampling(
    sections: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.groups with"):
        tiny_config(tmp_path, **sections)
