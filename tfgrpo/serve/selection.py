"""The best of several draws: by vote, by a verifier, or by one comparison of a judge.

Does not know HTTP, money or where draws come from. Source: self-consistency (Wang et al. 2023) for
the vote; own.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfgrpo.errors import ConfigError, TfgrpoError, VerifierError, boundary
from tfgrpo.messages import Message
from tfgrpo.prompts import render
from tfgrpo.protocols import Verifier
from tfgrpo.rollout import Rollout, Step, Task
from tfgrpo.runtime.import_string import load_object
from tfgrpo.runtime.redaction import redact

log = logging.getLogger(__name__)

__all__ = ["Chosen", "Extractor", "best_by_score", "best_by_vote", "comparison", "extractor",
           "read_best"]  # fmt: skip

Extractor = Callable[[str], object]
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which draw is answered, and how sure that is."""

    index: int
    agreement: float | None = None
    """Share of the draws that agree; None where nothing was counted."""


def extractor(name: str) -> Extractor:
    """Return what makes two draws agree: `text`, `number`, `last_line` or a function of a text.

    Raises:
        ConfigError: the function cannot be loaded.

    >>> extractor("number")("so it is 1,250.0"), extractor("last_line")("a\\n\\n B ")
    (1250.0, 'b')
    """
    if name == "text":
        return lambda text: " ".join(text.split()).casefold()
    if name == "last_line":
        return lambda text: (
            ([s for s in text.splitlines() if s.strip()] or [""])[-1].strip().lower()
        )
    if name == "number":
        return _last_number
    found = load_object(name, "answer")
    if not callable(found):
        raise ConfigError(f"answer: {name!r} is no function")

    def guarded(text: str) -> object:
        with boundary(TfgrpoError, f"answer function {name}"):
            return found(text)

    return guarded


def _last_number(text: str) -> object:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else text.strip()


def best_by_vote(texts: Sequence[str], answer: Extractor) -> Chosen:
    """Return the first draw of the largest group of equal answers.

    >>> best_by_vote(["4", "5", "It is 5"], extractor("number")).index
    1
    """
    keys = [answer(t) for t in texts]
    counts = Counter(keys)
    most = max(counts.values())
    index = next(i for i, k in enumerate(keys) if counts[k] == most)
    return Chosen(index, most / len(texts))


async def best_by_score(
    texts: Sequence[str], task: Task, verifier: Verifier
) -> tuple[Chosen, list[float | None]]:
    """Return the draw with the highest reward, ties by first, and all rewards.

    A draw that cannot be judged has none; where none can, the first draw is answered.
    """
    rewards: list[float | None] = []
    for index, text in enumerate(texts):
        rollout = Rollout(f"draw{index}", task.task_id, (Step(Message("assistant", text)),))
        try:
            with boundary(VerifierError, "the route's verifier"):
                rewards.append((await verifier.score(rollout, task)).reward)
        except TfgrpoError as error:
            log.warning("a draw could not be judged: %s", redact(str(error)))
            rewards.append(None)
    known = [r for r in rewards if r is not None]
    if not known:
        return Chosen(0), rewards
    return Chosen(rewards.index(max(known))), rewards


def comparison(task: str, texts: Sequence[str]) -> str:
    """Return the prompt of one comparison; what is compared stands between marks that nobody who
    wrote it could foresee."""
    mark = secrets.token_hex(6)
    first, last = f"<<<{mark}", f"{mark}>>>"
    answers = "\n".join(f"Answer {i}:\n{first}\n{text}\n{last}" for i, text in enumerate(texts, 1))
    return render("serve_best", open_mark=first, close_mark=last, task=task, answers=answers)


def read_best(reply: str, n: int) -> Chosen:
    """Return what a judge chose; the first draw where its reply cannot be read.

    >>> read_best("Shorter.\\nBest: 2", 3).index, read_best("all good", 3).index
    (1, 0)
    """
    lines = [line.strip() for line in reply.splitlines() if line.strip()]
    match = re.fullmatch(r"(?:best\s*:\s*)?(\d{1,9})\.?", lines[-1] if lines else "", re.IGNORECASE)
    number = int(match[1]) if match else 0
    return Chosen(number - 1 if 1 <= number <= n else 0)
