"""Saved groups as a training run's rollouts: what a search or an earlier run made, with its scores.

Token ids that a rollout holds are kept where its turns are one growing sequence; else its text is
tokenised as this model reads it. Nothing is sampled or judged again. Log-probs of whoever made a
rollout are not this model's, so ratios start at 1 (off-policy without a correction). A search's
`node_path` names the nodes for credits of trees.

Does not know losses. Source: own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message
from tfgrpo.prompts import render
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.turns import TurnTokens
from tfgrpo.rollout import Rollout, RolloutGroup, Step, Task
from tfgrpo.runtime.canonical import derive_seed


@dataclass(frozen=True, slots=True)
class Reading:
    """How saved text becomes token ids."""

    tokenizer: Any
    """A Hugging Face tokenizer."""
    turns: TurnTokens
    """Renders answers between turns."""
    end_id: int | None
    """Ends a turn that is tokenised here; None for none."""
    keeps_tokens: bool = False
    """The groups' token ids are this model's."""


def action_text(action: Message) -> str:
    """Return a turn as text; a call in the form in which calls are offered as text.

    Raises:
        ConfigError: several calls in one turn, which that form cannot hold.
    """
    if not action.tool_calls:
        return action.content.strip()
    if len(action.tool_calls) > 1:
        raise ConfigError(
            f"a saved turn has {len(action.tool_calls)} tool calls, and the text form of a call "
            "holds one: leave such rollouts out"
        )
    call = action.tool_calls[0]
    said = action.content.strip()
    return "\n".join(x for x in (said, f"Action: {call.name} {call.arguments}") if x)


def answer_turns(observations: Sequence[Message]) -> list[Message]:
    """Return what came back as user turns; a tool's answer as the text form shows it."""
    return [
        Message("user", render("react_observation", text=m.content)) if m.role == "tool" else m
        for m in observations
    ]


def with_tokens(rollout: Rollout, prompt_ids: Sequence[int], reading: Reading) -> Rollout:
    """Return the rollout as one growing sequence of this model's tokens.

    Raises:
        ConfigError: a turn that cannot be rendered.
    """
    if reading.keeps_tokens and _is_whole(rollout):
        return rollout
    sequence, steps = list(prompt_ids), []
    end = () if reading.end_id is None else (reading.end_id,)
    for number, step in enumerate(rollout.steps):
        text = action_text(step.action)
        encoded = reading.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = (*encoded, *end)
        steps.append(Step(step.action, step.observations, ids, None, tuple(sequence)))
        sequence += ids
        if number + 1 < len(rollout.steps):
            sequence += reading.turns(answer_turns(step.observations), ids)
    metadata = dict(rollout.metadata)
    path = metadata.get("node_path")
    if path is not None and "state_keys" not in metadata:
        metadata["state_keys"] = [str(n) for n in path]
    return replace(rollout, steps=tuple(steps), metadata=metadata)


def _is_whole(rollout: Rollout) -> bool:
    sequence: list[int] = []
    for step in rollout.steps:
        if step.token_ids is None or step.prompt_token_ids is None:
            return False
        if list(step.prompt_token_ids[: len(sequence)]) != sequence:
            return False
        sequence = [*step.prompt_token_ids, *step.token_ids]
    return True


class SavedGroups:
    """Gives a step's tasks their saved groups; a `step_groups.MakeGroups`.

    Args:
        groups: at least one with a graded rollout; several of a task take turns by chance.
        prompter: tasks to token ids; rollouts that pass its context are left out and counted.
        reading: how text becomes tokens.

    Raises:
        ConfigError: no graded rollout is left.
    """

    def __init__(
        self, groups: Iterable[RolloutGroup], prompter: Prompter, reading: Reading
    ) -> None:
        context_tokens = prompter.context_tokens
        self._of: dict[str, list[RolloutGroup]] = {}
        self.left_out = 0
        """Rollouts without a score, or longer than the model's context."""
        for group in groups:
            prompt = prompter.encode(group.task, group.context)
            kept = []
            for rollout in group.rollouts:
                made = None
                if rollout.score is not None and rollout.steps:
                    made = with_tokens(rollout, prompt, reading)
                if made is None or _length(made) > context_tokens:
                    self.left_out += 1
                else:
                    kept.append(made)
            if kept:
                whole = replace(group, rollouts=tuple(kept))
                self._of.setdefault(group.task.task_id, []).append(whole)
        if not self._of:
            raise ConfigError(
                f"tasks.groups holds no graded rollout that fits the model's context of "
                f"{context_tokens} tokens; {self.left_out} were left out"
            )

    @property
    def tasks(self) -> list[Task]:
        """The tasks that there are groups of."""
        return [groups[0].task for groups in self._of.values()]

    def __call__(self, tasks: Sequence[Task], seed: int) -> list[RolloutGroup]:
        """Return one group a task, in order."""
        found = []
        for task in tasks:
            mine = self._of[task.task_id]
            found.append(mine[derive_seed(seed, task.task_id) % len(mine)])
        return found


def _length(rollout: Rollout) -> int:
    last = rollout.steps[-1]
    return len(last.prompt_token_ids or ()) + len(last.token_ids or ())


__all__ = ["Reading", "SavedGroups", "action_text", "with_tokens"]
