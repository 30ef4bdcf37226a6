"""Verifier that asks an LM to grade by a rubric.

What is judged stands between marks that its author cannot foresee, and the score is read from the
last line of the reply alone, in a few exact forms. A number that fits no form, leaves the scale or
could be meant on another scale is asked for once more; then it is a failure of the judge, never a
clamped or guessed reward.

Does not know whether the rubric is good. Source: own; the marks answer prompt injection through
judged text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from tfgrpo.errors import ConfigError, VerifierError
from tfgrpo.messages import Message
from tfgrpo.prompts import load, render
from tfgrpo.protocols import LM, Completion, Limits, Request, Sampling
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.runtime.canonical import canonical_json, derive_seed, digest, repr_of
from tfgrpo.runtime.json_text import best_json
from tfgrpo.runtime.lenient_json import read_lenient
from tfgrpo.runtime.terminal import clip
from tfgrpo.runtime.thinking import without_thinking
from tfgrpo.verifiers.answer import UnitVerifier, short

__all__ = ["Judge", "Scale", "read_score"]


@dataclass(frozen=True, slots=True)
class Scale:
    """The numbers a judge may give."""

    low: int = 0
    high: int = 100

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ConfigError(
                f"Judge: the scale runs from {self.low} to {self.high}; give two whole numbers, "
                "0 or more, the first below the second"
            )


_SCALE = Scale()
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_LABEL = (
    r"(?:(?:(?:the |my )?(?:final |overall |total )?"
    r"(?:score|grade|rating|mark|points|verdict|judge?ment|overall|total|note|punktzahl|bewertung"
    r"|punkte|puntuaci[oó]n|calificaci[oó]n|nota|pontua[cç][aã]o|punteggio|voto|оценка|балл"
    r"|评分|得分|分数|評分|分數|スコア|点数|評価|점수|평점)"
    r"(?P<range>\s*[(\[][^()\[\]]{1,30}[)\]])?\s*(?:[:=]|is|[-\u2013\u2014](?=\s))\s*)"
    r"|I(?:'d| would)? (?:give|assign)\b[^0-9.:;\n]{0,60}\b(?:score|grade|rating) of\s+)?"
)
_END = r"(?:\s*(?:points?|pts|stars?))?(?:\s*\([^()0-9]{0,60}\))?"
_SET_OFF = (
    re.compile(rf"<(\w{{1,20}})>\s*({_NUMBER[1:-1]}[^<>]{{0,12}}?)\s*</\1>"),  # <score>85</score>
    re.compile(rf"()\\boxed\s*\{{\s*({_NUMBER[1:-1]})\s*\}}"),
    re.compile(
        rf"()[\[(<{{]{{1,2}}\s*({_NUMBER[1:-1]}(?:\s*(?:/|out of)\s*[0-9.]+|\s*%)?)"
        r"\s*[\])>}]{1,2}"
    ),
    re.compile(r"^\[\[()([^\[\]]{1,60})\]\]$"),
)
"""A score set off by marks, as in `[[85]]`; the marks say nothing."""
_END_MARK = re.compile(r"<\|[a-z_]{1,30}\|>|</s>|<end_of_turn>|<eos>", re.IGNORECASE)
"""What ends a turn in a model's own alphabet, where a server lets it through."""
_NAMES = ("score", "grade", "rating")
_BARE = re.compile(rf"{_LABEL}{_NUMBER}{_END}", re.IGNORECASE)
_OUT_OF = re.compile(
    rf"(?:[^0-9]*?[^0-9.,\-\u2212])??{_NUMBER}\s*(?:/|out of)\s*{_NUMBER}{_END}", re.IGNORECASE
)
_PERCENT = re.compile(rf"{_LABEL}{_NUMBER}\s*%", re.IGNORECASE)
_BEFORE = re.compile(r"^(?:#{1,6}|[->|\u2022])\s+")
_AROUND = '*`_ "\u201c\u201d\u2605\u2b50\U0001f31f'
"""Emphasis, quotes and stars around a line or a number."""


def read_score(reply: str, scale: Scale) -> tuple[float | None, str]:
    """Return (reward in [0, 1], "") or (None, why the reply cannot be read).

    Only the last line counts. On a scale up to more than 1, a fraction of at most 1 is ambiguous:
    it may be meant on the scale or as a share.

    >>> read_score("Clear and right.\\nScore: 85", Scale())
    (0.85, '')
    >>> read_score("0.8", Scale())[0]
    """
    reply = without_thinking(reply).replace("\uff1a", ":")  # a wide colon
    reply = _END_MARK.sub("", reply)
    lines = [line.strip() for line in reply.split("\n") if line.strip()]
    if not lines:
        return None, "the reply is empty"
    line = _unmarked(lines[-1])
    if line.endswith("}") or line == "":
        line = _named_in_json(reply) or line
    if found := _BARE.fullmatch(line):
        if found["range"] and str(scale.high) not in re.findall(r"[0-9]+", found["range"]):
            return None, f"{found['range'].strip()} is not the scale {scale.low} to {scale.high}"
        return _on_scale(found[2], scale)
    if found := _OUT_OF.fullmatch(line):
        return _as_share(Decimal(found[1]), Decimal(found[2]), scale)
    if found := _PERCENT.fullmatch(line):
        return _as_share(Decimal(found[2]), Decimal(100), scale)
    return None, f"the last line {short(line, 80)} is not of the form 'Score: NUMBER'"


def _unmarked(line: str) -> str:
    """Return a line without emphasis and without the marks that set a score off."""
    line = _BEFORE.sub("", line.replace("**", "").replace("$", "").strip())
    line = line.strip(_AROUND).rstrip(".,!").strip(_AROUND)
    result = line.removesuffix("[/RESULT]").rpartition(
        "[RESULT]"
    )  # as graders are trained to write
    line = result[2].strip() if result[1] else line
    for pattern in _SET_OFF:
        line = pattern.sub(lambda m: m[2] if (m.re.groups or 0) > 1 else "", line, count=2)
    line = re.sub(r"(?<=[:=\s])[`*_\"\u201c]+(?=[0-9])", "", line)
    return line.strip(_AROUND)


def _named_in_json(reply: str) -> str | None:
    """Return the one score of a JSON object that ends a reply."""

    def fits(value: object) -> float:
        return float(isinstance(value, dict) and sum(n in value for n in _NAMES) == 1)

    found = best_json(reply, fits, read_lenient)
    if found is None or reply[found.end :].strip("`\n \t"):
        return None
    value = next(found.value[n] for n in _NAMES if n in found.value)
    is_number = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    return str(value).strip() if is_number else None


def _on_scale(text: str, scale: Scale) -> tuple[float | None, str]:
    value = Decimal(text)
    if not scale.low <= value <= scale.high:
        return None, f"{text} is not from {scale.low} to {scale.high}"
    if "." in text and 0 < value <= 1 < scale.high:
        return None, f"{text} may be meant on the scale or as a share of 1"
    return float((value - scale.low) / (scale.high - scale.low)), ""


def _as_share(value: Decimal, most: Decimal, scale: Scale) -> tuple[float | None, str]:
    if most == scale.high:
        if not scale.low <= value <= scale.high:
            return None, f"{value} out of {most} is not from {scale.low} to {scale.high}"
        return float((value - scale.low) / (scale.high - scale.low)), ""
    if scale.low != 0 or most <= 0 or value > most:
        return None, f"{value} out of {most} does not fit a scale from {scale.low} to {scale.high}"
    return float(value / most), ""


class Judge(UnitVerifier):
    """A reward from 0 to 1 by an LM's grade under a rubric; one LM call, two at most.

    Args:
        lm: what judges.
        rubric: what is good and what is bad, in words.
        scale: of the grades; the reward is (grade - low) / (high - low). Settings files give `low`
            and `high`.
        show_reference: let the judge see the task's reference, where there is one.
        sampling: temperature 0 unless given.
        limits: of each call.
        max_chars: longest task, reference and answer shown; longer ones keep head and tail.
    """

    def __init__(
        self,
        lm: LM,
        rubric: str,
        *,
        scale: Scale = _SCALE,
        show_reference: bool = True,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        max_chars: int = 20_000,
    ) -> None:
        if not rubric.strip():
            raise ConfigError("Judge: the rubric is empty; say what a good answer is")
        if max_chars < 100:
            raise ConfigError(f"Judge: max_chars is {max_chars}; it must be 100 or more")
        self._lm = lm
        self._rubric = rubric.strip()
        self._scale = scale
        self._show_reference = show_reference
        self._sampling = sampling or Sampling(temperature=0.0)
        self._limits = limits or Limits()
        self._max_chars = max_chars
        settings = {
            "lm": lm.identity,
            "rubric": self._rubric,
            "scale": self._scale,
            "show_reference": show_reference,
            "sampling": self._sampling,
            "max_chars": max_chars,
            "prompts": [load(n) for n in ("judge", "judge_reference", "judge_again")],
        }
        super().__init__("judge", settings)

    def check_task(self, task: Task) -> None:
        """Every task can be judged."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Ask the judge.

        Raises:
            VerifierError: no readable score in two replies, or the judge refused.
            ProviderError: a call failed.
        """
        turns = [Message("user", self._prompt(rollout, task))]
        first = await self._ask(turns, rollout)
        reward, problem = self._read(first)
        reply = first
        if reward is None:
            again = render("judge_again", problem=problem, **self._bounds())
            turns += [Message("assistant", first.text), Message("user", again)]
            reply = await self._ask(turns, rollout)
            reward, problem = self._read(reply)
        if reward is None:
            raise VerifierError(
                f"judge {self._lm.model_id!r} gave no readable score in two replies: {problem} "
                f"(first {short(first.text, 80)}, second {short(reply.text, 80)})"
            )
        reason = "\n".join(first.text.strip().splitlines()[:-1]).strip()
        return Score(reward, clip(reason, 2000) or f"the judge gave {short(reply.text, 80)}")

    def _read(self, reply: Completion) -> tuple[float | None, str]:
        if reply.finish == "content_filter":
            raise VerifierError(f"judge {self._lm.model_id!r}: its content filter ended the reply")
        if reply.finish == "length":
            return None, "the reply was cut off at its token limit"
        return read_score(reply.text, self._scale)

    async def _ask(self, turns: list[Message], rollout: Rollout) -> Completion:
        request = Request(tuple(turns), sampling=self._sampling, limits=self._limits)
        seed = derive_seed("judge", rollout.rollout_id, len(turns))
        replies = await self._lm.complete(request, 1, [seed])
        if not replies:
            raise VerifierError(f"judge {self._lm.model_id!r} returned no reply")
        return replies[0]

    def _bounds(self) -> dict[str, str]:
        return {"low": str(self._scale.low), "high": str(self._scale.high)}

    def _prompt(self, rollout: Rollout, task: Task) -> str:
        answer = clip(rollout.answer, self._max_chars)
        text = clip(task.text, self._max_chars)
        # A text cannot hold the digest of itself, so its author cannot close the field. Derived
        # and not drawn, so that the same judgement is the same call and can be cached.
        token = digest([self._rubric, text, answer, repr_of(task.reference)], 16)
        marks = {"open_mark": f"<<<{token}>>>", "close_mark": f"<<<end {token}>>>"}
        block = ""
        if self._show_reference and task.reference is not None:
            given = task.reference
            shown = given if isinstance(given, str) else canonical_json(given)
            block = (
                render("judge_reference", reference=clip(shown, self._max_chars), **marks) + "\n"
            )
        return render(
            "judge",
            rubric=self._rubric,
            task=text,
            answer=answer,
            reference_block=block,
            **marks,
            **self._bounds(),
        )
