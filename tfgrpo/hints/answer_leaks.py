"""Texts of hints: shares of a worked solution, and the check that help does not give the answer.

Whoever helps a policy on, in training or over an API, asks here first. Texts are compared, not
values. Does not know when help is given, plans, models or tokens.

Idea: cut references (QuestA, GHPO); the leak check and the stop before the answer are own: none of
the released codes has one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Task
from tfgrpo.runtime.json_text import shown

__all__ = [
    "answers_of",
    "cut_before_leak",
    "leak_position",
    "leaks",
    "share_of",
    "solution_of",
]


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


def share_of(text: str, share: float) -> str:
    """Return the first `share` of a text's characters, cut back to the end of a word.

    `share` is clipped to [0, 1]. The result grows with `share`.

    >>> share_of("one two three", 0.6), share_of("one two three", 0.0), share_of("one", 1.0)
    ('one two', '', 'one')
    """
    length = round(len(text) * min(1.0, max(0.0, share)))
    if length >= len(text):
        return text.rstrip()
    cut = text[:length]
    if not text[length].isspace() and not cut.endswith(tuple(" \t\n")):
        space = max((cut.rfind(c) for c in " \t\n"), default=-1)
        cut = cut[: space + 1]
    return cut.rstrip()


def solution_of(task: Task, key: str = "solution") -> str:
    """Return the worked solution in a task's metadata, or an empty text.

    Raises:
        ConfigError: the value is not a text.
    """
    value = task.metadata.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(
            f"task {task.task_id!r}: metadata.{key} is {shown(value)}; it must be a text"
        )
    return value.strip()


def _boxed(text: str) -> tuple[str, ...]:
    boxes: list[tuple[int, int]] = []
    opened: list[int] = []  # where each open brace's content begins; negative: no box
    for match in re.finditer(r"(\\boxed\s*)?\{|\}", text):
        if match[0] != "}":
            opened.append(match.end() if match[1] else -1)
        elif opened and (start := opened.pop()) >= 0:
            boxes.append((start, match.start()))
    found = (text[start:end].strip() for start, end in sorted(boxes))
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
