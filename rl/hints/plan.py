"""One record for every kind of help: `HintPlan`, and the check that help does not give the answer.

A plan carries text; whoever rolls it turns text into token ids. A plan whose help stands in the
prompt becomes a `ContextPart`; help forced at the start of a response stays in the plan, because a
context cannot hold it. Does not know when a plan is used (schedulers do), models or tokens.

Idea: the seven axes on which SAGE, Scaf-GRPO, ADHint, POPE, QuestA, BREAD and StepHint differ, as
one record (own). The leak check is own: none of the released codes has one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tfgrpo.context import ContextPart
from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Task

HintSource = Literal["none", "self", "teacher", "reference", "oracle", "given"]
"""Who wrote the help; `given` stood in the task's metadata without a writer's name."""
TrainOn = Literal["generated", "generated_and_prefix_if_positive", "none"]
"""Which tokens carry a loss: what the policy wrote; also a forced prefix, unless the advantage is
negative; or nothing."""
Condition = Literal["as_rolled", "original"]
"""Log-probs under the prompt as rolled, or under the bare task's prompt (off-policy)."""


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
    """Plans of equal key share a baseline."""
    weight: float = 1.0
    """Loss weight of the plan's rows, at least 0."""
    train_on: TrainOn = "generated"
    condition: Condition = "as_rolled"

    def __post_init__(self) -> None:
        if self.level < 0 or self.weight < 0 or (self.n is not None and self.n < 1):
            raise ConfigError(
                f"hint plan: level {self.level} and weight {self.weight} must be at least 0, "
                f"n {self.n} at least 1 (None is the group size)"
            )

    @property
    def is_bare(self) -> bool:
        """True when the policy is given nothing but the task."""
        return not self.text and not self.response_prefix

    def part(self) -> ContextPart | None:
        """Return the plan as a part of a context, or None for the bare task.

        Raises:
            ConfigError: the plan forces a response prefix, which a context cannot hold.

        >>> HintPlan(text="Factor it.", level=2, source="self").part().source
        'hint:self:2'
        """
        if self.response_prefix:
            raise ConfigError(
                "this hint plan forces the start of the response; a context can only add to the "
                "prompt, so roll it with a generator that takes response prefixes"
            )
        if not self.text:
            return None
        return ContextPart("hint", self.text, source=f"hint:{self.source}:{self.level}")


def level_of(part: ContextPart | None) -> int:
    """Return the level that `HintPlan.part` wrote into a part's source; 0 for the bare task.

    Raises:
        ConfigError: the part was not made by a hint plan.

    >>> level_of(None), level_of(ContextPart("hint", "x", source="hint:reference:3"))
    (0, 3)
    """
    if part is None:
        return 0
    found = re.fullmatch(r"hint:[a-z]+:(\d+)", part.source)
    if found is None:
        raise ConfigError(
            f"context part with source {part.source!r} was not made by a hint plan; its source "
            "must read hint:WRITER:LEVEL"
        )
    return int(found[1])


def answers_of(reference: Any) -> tuple[str, ...]:
    """Return the answer texts that a hint must not contain.

    Texts and numbers are answers; a list holds alternatives; of an object only `answer`, `answers`
    and `target` are looked at, since other fields (tests, schemas) are no answers. A text with
    GSM8K's `####` mark is the part after it; one with `\\boxed{...}` is what stands in the box.
    Booleans and None are not checked.

    >>> answers_of("He pays 3 times 4. #### 12"), answers_of([0.5, "1/2"]), answers_of(True)
    (('12',), ('0.5', '1/2'), ())
    """
    if reference is None or isinstance(reference, bool):
        return ()
    if isinstance(reference, Mapping):
        return tuple(
            a for k in ("answer", "answers", "target") for a in answers_of(reference.get(k))
        )
    if isinstance(reference, Sequence) and not isinstance(reference, str):
        return tuple(a for item in reference for a in answers_of(item))
    text = str(reference).rsplit("####", 1)[-1].strip()
    return _boxed(text) or ((text,) if text else ())


def leaks(text: str, task: Task) -> bool:
    """Return whether the reference answer stands in a hint's text.

    Letter case, runs of white space and thousands separators are ignored; the answer must stand
    alone, so that 12 is not found in 120, 3.12 or x12. Strict on purpose: a short answer that
    occurs by chance is a leak too, as is one that the task's own text mentions. Texts are compared,
    not values: one half is not found in 0.5.

    >>> leaks("so you get 1,200 in all", Task("a", "?", reference=1200))
    True
    >>> leaks("so you get 12000", Task("a", "?", reference=1200))
    False
    """
    return leak_position(text, task) is not None


def leak_position(text: str, task: Task) -> int | None:
    """Return where in `text` the answer first stands, or None when it does not."""
    found = [
        match.start()
        for answer in answers_of(task.reference)
        if (match := re.search(_pattern(answer), text, re.IGNORECASE))
    ]
    return min(found, default=None)


def cut_before_leak(text: str, task: Task) -> str:
    """Return the text up to the first place where the answer stands, without trailing space.

    >>> cut_before_leak("3 times 4 is 12, so 12", Task("a", "?", reference="12"))
    '3 times 4 is'
    """
    position = leak_position(text, task)
    return (text if position is None else text[:position]).rstrip()


def _boxed(text: str) -> tuple[str, ...]:
    found = []
    for match in re.finditer(r"\\boxed\s*\{", text):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                found.append(text[match.end() : end].strip())
                break
    return tuple(dict.fromkeys(f for f in found if f))


def _pattern(answer: str) -> str:
    plain = answer.replace(",", "") if re.fullmatch(r"[+-]?[\d,]+(\.\d+)?", answer) else answer
    if re.fullmatch(r"[+-]?\d+(\.\d+)?", plain):
        whole, dot, fraction = plain.partition(".")
        digits = ",?".join(re.escape(c) for c in whole)
        # 12 equals 12.0 and 12.50 equals 12.5; trailing zeros do not hide an answer.
        fraction = fraction.rstrip("0")
        tail = rf"\.{fraction}0*" if dot and fraction else r"(?:\.0+)?"
        return rf"(?<![\w.])(?<!\d,){digits}{tail}(?![\w])(?!,?\d)(?!\.\d)"
    words = r"\s+".join(re.escape(w) for w in plain.split())
    return rf"(?<!\w){words}(?!\w)"
