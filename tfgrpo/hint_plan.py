"""One record for every kind of help, a text asked for on the way, and a group made under a plan.

A plan carries text; whoever rolls it turns text into token ids. Help that stands in the prompt
becomes a `ContextPart`; help forced at the start of a response stays in the plan, because a context
cannot hold it. Does not know when a plan is used (schedulers do), models or tokens.

Idea: the seven axes on which SAGE, Scaf-GRPO, ADHint, POPE, QuestA, BREAD and StepHint differ, as
one record (own); second tries (drafts, perturbations, retries from a step) are plans too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tfgrpo.context import ContextPart, PartKind
from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, RolloutGroup, Step

__all__ = [
    "BARE",
    "Ask",
    "Condition",
    "HintPlan",
    "HintSource",
    "PlannedGroup",
    "TrainOn",
    "Write",
    "WriteResult",
    "level_of",
]

HintSource = Literal["none", "self", "teacher", "reference", "oracle", "given"]
"""Who wrote the help; `given` stood in the task's metadata without a writer's name."""
TrainOn = Literal["generated", "generated_and_prefix_if_positive", "none"]
"""Which tokens carry a loss: what the policy wrote; also a forced prefix, unless the advantage is
negative; or nothing."""
Condition = Literal["as_rolled", "original", "corrected"]
"""Log-probs under the prompt as rolled, or under the bare task's prompt (off-policy): `original`
takes them as they are, `corrected` over what their sampler reported under the prompt as rolled."""


@dataclass(frozen=True, slots=True)
class HintPlan:
    """What one set of rollouts of a task is given, and how it is trained on."""

    text: str = ""
    """Help that stands in the prompt; empty for none."""
    response_prefix: str = ""
    """Text forced at the start of the response; empty for none."""
    n: int | None = None
    """Rollouts under this plan; None is the group size."""
    level: int = 0
    """Strength index; 0 is the bare task."""
    source: HintSource = "none"
    group_key: str = ""
    """Rollouts of a group whose plans have equal keys share a baseline."""
    weight: float = 1.0
    """Loss weight of the plan's rows, at least 0."""
    train_on: TrainOn = "generated"
    condition: Condition = "as_rolled"
    weigh_prefix: bool = False
    """Trained prefix tokens weigh less where their entropy is unlike the policy's own (ADHint)."""
    kind: PartKind = "hint"
    """What the text in the prompt is, and so how and where it is shown."""
    turns: tuple[Message, ...] = ()
    """A worked example as chat turns, for kind `exemplar`."""
    prefix_ids: tuple[int, ...] = ()
    """Token ids forced before `response_prefix`: an own earlier attempt, kept as it was written."""
    prefix_chars: int | None = None
    """Keep only those of `prefix_ids` whose text lies within so many characters; None keeps all."""
    replay: tuple[Step, ...] = ()
    """Own turns that are taken again in the environment before the policy goes on."""
    is_given: bool = False
    """Nothing is drawn: `response_prefix` is the rest of the reply, and is what is trained on."""
    shaping: float = 0.0
    """γ of the ratio r/(r + γ) in place of the loss's own; 0 keeps the loss."""
    distil: float = 0.0
    """Weight of a further term that raises good rollouts under the bare prompt (NudgeRL)."""

    def __post_init__(self) -> None:
        weights = min(self.level, self.weight, self.shaping, self.distil)
        if weights < 0 or (self.n is not None and self.n < 1):
            raise ConfigError(
                f"hint plan: level {self.level}, weight {self.weight}, shaping {self.shaping} and "
                f"distil {self.distil} must be at least 0, n {self.n} at least 1 (None is the "
                "group size)"
            )

    @property
    def is_bare(self) -> bool:
        """True when the policy is given nothing but the task, and its own turns to go on from."""
        return not (self.text or self.turns or self.response_prefix or self.prefix_ids)

    @property
    def forces_prefix(self) -> bool:
        """True when a reply's first tokens are not the policy's to choose."""
        return bool(self.response_prefix or self.prefix_ids)

    @property
    def label(self) -> str:
        """`none` for the bare task, else kind, writer and level, as figures count it.

        >>> HintPlan(text="x", level=2, source="self").label, HintPlan().label
        ('hint:self:2', 'none')
        >>> HintPlan(response_prefix="x", level=1, source="oracle").label
        'prefix:oracle:1'
        """
        if self.is_bare:
            return "none"
        kind = self.kind if self.text or self.turns else "prefix"
        return f"{kind}:{self.source}:{self.level}"

    def part(self) -> ContextPart | None:
        """Return the help in the prompt as a part of a context, or None where there is none.

        >>> HintPlan(text="Factor it.", level=2, source="self").part().source
        'hint:self:2'
        """
        if not self.text and not self.turns:
            return None
        source = f"{self.kind}:{self.source}:{self.level}"
        return ContextPart(self.kind, self.text, self.turns, source=source)


BARE = HintPlan()
"""The task alone."""


@dataclass(frozen=True, slots=True)
class Write:
    """A text that the policy is asked for within a visit, under the weights as they are."""

    key: str
    """Tells several texts of a visit apart."""
    prompt: str
    read: Callable[[str], Any]
    """A reply to what it says, or None where it cannot be read and is asked for again."""
    retries: int = 0
    """Further tries after an unreadable reply."""
    max_tokens: int | None = None
    """Limit of the reply; None is a rollout's."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What came of a `Write`."""

    key: str
    value: Any
    """As read; None where no try could be read, or the prompt fills the model's context."""
    tries: int
    rollout: Rollout | None = None
    """The last reply with its token ids, ungraded; None where nothing was drawn."""


Ask = HintPlan | Write
"""What a scheduler may ask for."""


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A plan and the graded rollouts that were made under it."""

    plan: HintPlan
    group: RolloutGroup
    written: tuple[WriteResult, ...] = ()
    """Texts that were asked for when this was the visit's last set, in order."""

    def said(self, key: str) -> WriteResult | None:
        """Return what came of a text by its key; None where it was not asked for here."""
        return next((w for w in self.written if w.key == key), None)


def level_of(part: ContextPart | None) -> int:
    """Return the level that `HintPlan.part` wrote into a part's source; 0 for the bare task.

    Raises:
        ConfigError: the part was not made by a hint plan.

    >>> level_of(None), level_of(ContextPart("hint", "x", source="hint:reference:3"))
    (0, 3)
    """
    if part is None:
        return 0
    found = re.fullmatch(r"[a-z]+:[a-z]+:(\d+)", part.source)
    if found is None:
        raise ConfigError(
            f"context part with source {part.source!r} was not made by a hint plan; its source "
            "must read hint:WRITER:LEVEL"
        )
    return int(found[1])
