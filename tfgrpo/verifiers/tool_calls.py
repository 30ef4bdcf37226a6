"""Verifier of tool use: were the calls made that the reference lists?

Does not know results of tools. Source: own; matching as in `tfgrpo.policies.tool_calls`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfgrpo.errors import ConfigError
from tfgrpo.policies.tool_calls import calls_of, match_calls
from tfgrpo.protocols import ToolSpec
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.verifiers.answer import UnitVerifier, short

__all__ = ["ToolCalls"]


class ToolCalls(UnitVerifier):
    """1 where the calls of a rollout are the expected ones under the tools' schemas.

    The reference is a list of `{"name": ..., "arguments": {...}}`.

    Args:
        specs: the tools, with their schemas.
        ordered: the order counts.
        partial: give the share of matching calls among all made or expected; else 1 or 0.
    """

    def __init__(
        self, specs: Sequence[ToolSpec], *, ordered: bool = False, partial: bool = False
    ) -> None:
        self._specs = tuple(specs)
        self._ordered = ordered
        self._partial = partial
        settings = [[s.to_dict() for s in specs], ordered, partial]
        super().__init__("tool_calls", settings)

    def check_task(self, task: Task) -> None:
        """Raise `ConfigError` for expected calls that their tools' schemas refuse."""
        match_calls(_expected(task), [], self._specs)

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Compare; asks nobody."""
        expected, made = _expected(task), calls_of(rollout)
        result = match_calls(expected, made, self._specs, ordered=self._ordered)
        union = len(expected) + len(made) - result.n_matched
        share = result.n_matched / union if union else 1.0
        reward = share if self._partial else float(result.is_match)
        return Score(reward, "; ".join(result.reasons) or "the calls are right", {"share": share})


def _expected(task: Task) -> list[Mapping[str, object]]:
    given = task.reference
    if not isinstance(given, (list, tuple)) or not all(
        isinstance(c, Mapping) and isinstance(c.get("name"), str) for c in given
    ):
        raise ConfigError(
            f"task {task.task_id!r}: the reference {short(given, 80)} is no list of calls "
            '{"name": ..., "arguments": {...}}'
        )
    return list(given)
