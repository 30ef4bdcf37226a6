"""Reference answers as further members of their groups, for losses that imitate them.

The row is the group's prompt and the reference, worked solution before bare answer. It was not
sampled, so it has no log-probs of a sampler; its reward is the best that the verifier gives. It
counts in its group's advantages. Does not know losses. Idea: GRAO (arXiv 2508.07750), where a
reward model judges the reference too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tfgrpo.errors import ConfigError
from tfgrpo.hints.answer_leaks import solution_of
from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task

IS_GIVEN = "given"
"""Key of a given rollout's metadata."""


def reference_text(task: Task) -> str:
    """Return what a policy should have written: `metadata.solution`, else the reference.

    Raises:
        ConfigError: there is neither, or the reference is no text or number.
    """
    found = solution_of(task) or task.reference
    if isinstance(found, (str, int, float)) and not isinstance(found, bool) and str(found).strip():
        return str(found).strip()
    raise ConfigError(
        f"task {task.task_id!r} has no answer to imitate: give it a reference that is a text or a "
        "number, or a worked one in metadata.solution"
    )


@dataclass(frozen=True, slots=True)
class References:
    """How a task's reference becomes a rollout."""

    encode: Callable[[str], tuple[int, ...]]
    """A reply's text to token ids."""
    end: tuple[int, ...]
    """Ids that end a reply."""
    reward: float
    context_tokens: int
    """The model's window."""

    def added(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups, each with its reference as last member.

        Raises:
            ConfigError: a reference that does not fit, or none.
        """
        return [self._with(group) for group in groups]

    def _with(self, group: RolloutGroup) -> RolloutGroup:
        prompts = [r.steps[0].prompt_token_ids for r in group.graded if r.steps]
        prompt = next((p for p in prompts if p), None)
        if prompt is None:
            return group
        text = reference_text(group.task)
        ids = (*self.encode(text), *self.end)
        if len(prompt) + len(ids) > self.context_tokens:
            raise ConfigError(
                f"task {group.task.task_id!r}: its prompt and reference have "
                f"{len(prompt) + len(ids)} tokens and the model's context {self.context_tokens}; "
                "shorten the reference or leave the task out"
            )
        step = Step(Message("assistant", text), token_ids=ids, prompt_token_ids=prompt)
        rollout = Rollout(
            f"{group.group_id}:reference",
            group.task.task_id,
            (step,),
            "graded",
            Score(self.reward),
            sample_index=len(group.rollouts),
            metadata={IS_GIVEN: True},
        )
        return replace(group, rollouts=(*group.rollouts, rollout))
