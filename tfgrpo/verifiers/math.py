r"""Verifier of mathematics: are answer and reference the same expression?

The work is done by `math-verify` (extra `math`) in worker processes with a wall clock, since
parsing a hostile expression can hang and its own alarms need the main thread. Only the last
`\boxed{}` is looked at where there is one: neighbouring boxes would be joined into one set.

Does not know proofs or words (use `Exact`). Source: math-verify (Hugging Face).
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from decimal import Decimal
from pathlib import Path

from tfgrpo.errors import ConfigError, MissingExtraError, VerifierError
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.runtime.user_code import call_foreign
from tfgrpo.verifiers.answer import UnitVerifier, boxed, reference_text, short
from tfgrpo.verifiers.numbers import whole_number
from tfgrpo.verifiers.workers import WorkerPool

__all__ = ["Math"]

_WORKER = Path(__file__).with_name("math_worker.py")
_MOST_CHARS = 20_000


class Math(UnitVerifier):
    """1 where the answer equals the reference as mathematics, else 0.

    The reference is a number or LaTeX, with or without `$...$` or a box.

    Args:
        timeout_s: wall time of one comparison, seconds; past it the score is a `VerifierError`.
        workers: most worker processes; None takes the number of cores, at most 4.

    Raises:
        MissingExtraError: `math-verify` is not installed.
    """

    def __init__(self, *, timeout_s: float = 10.0, workers: int | None = None) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"Math: timeout_s is {timeout_s}; it must be above 0")
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtraError.of("math", "the math verifier", "math_verify")
        self._timeout_s = timeout_s
        size = min(4, os.cpu_count() or 1) if workers is None else workers
        # -P and not -I: the libraries may lie on PYTHONPATH, but never beside the script.
        self._pool = WorkerPool([sys.executable, "-P", str(_WORKER)], size, "verifier 'math'")
        self._checked: set[str] = set()
        super().__init__("math", [])

    def check_task(self, task: Task) -> None:
        """Raise `ConfigError` for a reference that is no mathematics; blocks for a moment."""
        gold = _gold(task)
        if gold in self._checked:
            return
        try:
            reply = self._pool.ask({"gold": gold}, max(self._timeout_s, 30.0))
        except VerifierError as exc:
            raise ConfigError(
                f"task {task.task_id!r}: the reference {short(gold, 80)} cannot be parsed: {exc}"
            ) from exc
        if not reply.get("parsed"):
            why = f" ({reply['error']})" if "error" in reply else ""
            raise ConfigError(
                f"task {task.task_id!r}: the reference {short(gold, 80)} cannot be parsed as "
                f"mathematics{why}; correct it, or use verifier 'exact' for words"
            )
        self._checked.add(gold)

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Compare in a worker process.

        Raises:
            VerifierError: no result within the time, or the comparison broke.
        """
        if _is_same_number(rollout.answer, task.reference):
            return Score(1.0, "the answer equals the reference")
        text = _without_exponents(rollout.answer[-_MOST_CHARS:])
        inside = boxed(text)
        if not (text if inside is None else inside).strip():
            return Score(0.0, "the answer is empty")
        request = {
            "gold": _gold(task),
            "answer": text if inside is None else f"\\boxed{{{inside}}}",
        }
        reply = await call_foreign(
            self._pool.ask, request, self._timeout_s, error=VerifierError, where="verifier 'math'"
        )
        if "error" in reply:
            raise VerifierError(f"verifier 'math' on {short(text, 80)}: {reply['error']}")
        if not reply["parsed"]:
            return Score(0.0, f"no mathematical answer found, expected {short(task.reference)}")
        if reply["equal"]:
            return Score(1.0, "the answer equals the reference")
        return Score(
            0.0, f"the answer is {short(reply['shown'])}, expected {short(task.reference)}"
        )

    def close(self) -> None:
        """End the worker processes; they also end with this object."""
        self._pool.close()


def _gold(task: Task) -> str:
    given = task.reference
    if (
        isinstance(given, bool)
        or not isinstance(given, (str, int, float))
        or not reference_text(given).strip()
    ):
        raise ConfigError(
            f"task {task.task_id!r}: the reference is {short(given, 80)}; Math needs a number or "
            "LaTeX"
        )
    text = _without_exponents(reference_text(given).strip())
    inside = boxed(text)
    # A box makes plain LaTeX an answer that the parser finds; text with dollars has its own marks.
    return (
        text
        if inside is None and "$" in text
        else f"\\boxed{{{text if inside is None else inside}}}"
    )


_EXPONENT = re.compile(
    r"(?<![\w.\\])(?:\d{1,40}(?:\.\d{1,40})?|\.\d{1,40})[eE][+-]?\d{1,3}(?![\w^]|\.\d)"
)


def _without_exponents(text: str) -> str:
    """Return a text with e-notation written out, which the parser would read as Euler's number."""
    return _EXPONENT.sub(lambda m: format(Decimal(m[0]), "f"), text)


def _is_same_number(answer: str, reference: object) -> bool:
    """Return whether both are one number, in whatever form, and the same."""
    wanted = reference_text(reference)
    given = boxed(answer)
    values = [whole_number(boxed(t) or t) for t in (wanted, given or answer.strip().rstrip("."))]
    return values[0] is not None and values[0] == values[1]
