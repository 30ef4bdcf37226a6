"""Verifiers that compare text: `Exact` with a reference, `Regex` with a pattern.

Does not know meaning: two spellings of one thing differ unless an option says otherwise.
Source: own.
"""

from __future__ import annotations

import re
import unicodedata

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.verifiers.answer import (
    MOST_CHARS,
    UnitVerifier,
    compiled,
    extracted,
    reference_text,
    short,
)
from tfgrpo.verifiers.patterns import try_pattern

__all__ = ["Exact", "Regex"]


class Exact(UnitVerifier):
    """1 where the answer equals the reference, else 0, or `contains_reward` where it is inside.

    The reference is a text, a number (compared as text), or a list of which any may match. Both
    sides are normalised to Unicode NFC and stripped.

    Args:
        ignore_case: compare case-folded.
        ignore_whitespace: runs of white space count as one space.
        ignore_punctuation: punctuation and symbols count as nothing.
        extract: pattern that finds the answer in the reply: last match, its first group. A reply
            without a match is wrong.
        contains_reward: reward, from 0 up to but not including 1, of an answer that holds the
            reference as whole words among others.
    """

    def __init__(
        self,
        *,
        ignore_case: bool = False,
        ignore_whitespace: bool = True,
        ignore_punctuation: bool = False,
        extract: str | None = None,
        contains_reward: float = 0.0,
    ) -> None:
        if not 0.0 <= contains_reward < 1.0:
            raise ConfigError(
                f"Exact: contains_reward is {contains_reward}; allowed are 0 up to below 1"
            )
        self._ignore_case = ignore_case
        self._ignore_whitespace = ignore_whitespace
        self._ignore_punctuation = ignore_punctuation
        self._extract = None if extract is None else compiled(extract, "Exact: extract")
        self._contains_reward = contains_reward
        settings = [ignore_case, ignore_whitespace, ignore_punctuation, extract, contains_reward]
        super().__init__("exact", settings)

    def check_task(self, task: Task) -> None:
        """Raise `ConfigError` for a reference that is no text or is empty once normalised."""
        self._references(task)

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Compare; asks nobody."""
        references = self._references(task)
        answer = await extracted(rollout.answer, self._extract)
        if answer is None:
            return Score(0.0, "the reply has no answer in the form asked for")
        given = self._normal(answer)
        if any(given == self._normal(r) for r in references):
            return Score(1.0, "the answer equals the reference")
        if self._contains_reward and any(_holds(given, self._normal(r)) for r in references):
            return Score(
                self._contains_reward,
                f"the reference {short(references[0])} is in the answer, among other words",
            )
        return Score(0.0, f"the answer is {short(answer)}, expected {short(references[0])}")

    def _references(self, task: Task) -> list[str]:
        given = task.reference
        items = list(given) if isinstance(given, (list, tuple)) else [given]
        if not items:
            raise ConfigError(f"task {task.task_id!r}: the reference is an empty list")
        for item in items:
            if isinstance(item, bool) or not isinstance(item, (str, int, float)):
                raise ConfigError(
                    f"task {task.task_id!r}: the reference {short(item, 80)} is no text or number; "
                    "give one, a list of them, or use another verifier"
                )
            if not self._normal(reference_text(item)):
                raise ConfigError(
                    f"task {task.task_id!r}: the reference {short(item, 80)} is empty once "
                    "normalised, "
                    "so that an empty answer would be right"
                )
        return [reference_text(item) for item in items]

    def _normal(self, text: str) -> str:
        text = unicodedata.normalize("NFC", text)
        if self._ignore_case:
            text = text.casefold()
        if self._ignore_punctuation:
            text = "".join(c for c in text if unicodedata.category(c)[0] not in "PS")
        return " ".join(text.split()) if self._ignore_whitespace else text.strip()


def _holds(text: str, part: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text[-MOST_CHARS:]) is not None


class Regex(UnitVerifier):
    """1 where the answer matches a pattern, else 0.

    Args:
        pattern: the pattern; None takes each task's reference as its pattern.
        full: match the whole stripped answer, not a part.
        ignore_case: ignore case.
        invert: reward the absence of a match.
    """

    def __init__(
        self,
        pattern: str | None = None,
        *,
        full: bool = False,
        ignore_case: bool = False,
        invert: bool = False,
    ) -> None:
        self._ignore_case = ignore_case
        self._full = full
        self._invert = invert
        self._pattern = (
            None
            if pattern is None
            else compiled(pattern, "Regex: pattern", ignore_case=ignore_case)
        )
        super().__init__("regex", [pattern, full, ignore_case, invert])

    def check_task(self, task: Task) -> None:
        """Raise `ConfigError` where the task has to give the pattern and does not."""
        self._of(task)

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Match; asks nobody. Raises `VerifierError` where matching finds no end."""
        pattern = self._of(task)
        answer = rollout.answer.strip()[-MOST_CHARS:]
        found = await try_pattern(pattern, answer, "full" if self._full else "search")
        said = "matches" if found else "does not match"
        return Score(
            float(found is not self._invert),
            f"the answer {said} {pattern.pattern!r}"
            + (", and must not" if found and self._invert else ""),
        )

    def _of(self, task: Task) -> re.Pattern[str]:
        if self._pattern is not None:
            return self._pattern
        where = f"task {task.task_id!r}: reference"
        if not isinstance(task.reference, str) or not task.reference:
            raise ConfigError(
                f"{where} is {short(task.reference, 80)}; Regex without a pattern needs one there"
            )
        return compiled(task.reference, where, ignore_case=self._ignore_case)
