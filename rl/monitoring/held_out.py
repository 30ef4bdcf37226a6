"""Held-out scores of a run: before training, on the way, at the end; kept, so that none is made
twice, and compared with the ones before training, paired by task.

Does not know how replies are made. Source: own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tfgrpo.rollout import RolloutGroup
from tfgrpo.statistics import mean_interval, paired_difference

__all__ = ["HeldOutLog", "sample_row"]

_LONGEST = 1200
_REPLIES = 4


class HeldOutLog:
    """`evaluations.jsonl` of a run: one line for each step that was scored.

    Args:
        path: the file.
        key: what the scores hang on: held-out tasks, draws, temperature. Lines of another key are
            none of these.
        writes: False for all processes but one.
    """

    def __init__(self, path: Path, key: str, *, writes: bool = True) -> None:
        self._path = path
        self._key = key
        self._writes = writes
        self._rows: dict[int, dict[str, Any]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut off; its step is scored again
            if isinstance(row, dict) and row.get("key") == key:
                self._rows[int(row["step"])] = row

    def of_step(self, step: int) -> dict[str, Any] | None:
        """Return what a step was found to be worth; None where it was not scored."""
        row = self._rows.get(step)
        return None if row is None else self._told(row)

    def add(
        self,
        step: int,
        scores: Mapping[str, Sequence[float]],
        reward_range: tuple[float, float],
    ) -> dict[str, Any]:
        """Keep the scores of a step; return what they say: mean, interval, change since before."""
        found = mean_interval(scores).within(reward_range)
        row: dict[str, Any] = {
            "step": step,
            "key": self._key,
            "mean": found.estimate,
            "low": found.low,
            "high": found.high,
            "tasks": len(scores),
            "scores": {name: list(rewards) for name, rewards in scores.items()},
        }
        before = self._rows.get(0)
        if step and before is not None and before["scores"].keys() & scores.keys():
            gain = paired_difference(before["scores"], scores)
            row["gain"] = asdict(gain.within(reward_range, of_difference=True))
        self._rows[step] = row
        if self._writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(self._rows[s]) + "\n" for s in sorted(self._rows)]
            self._path.write_text("".join(lines), encoding="utf-8")
        return self._told(row)

    def _told(self, row: Mapping[str, Any]) -> dict[str, Any]:
        told = {k: row[k] for k in ("mean", "low", "high", "tasks", "step")}
        before = self._rows.get(0)
        if row["step"] and before is not None and "gain" in row:
            told["before"] = {k: before[k] for k in ("mean", "low", "high")}
            told["gain"] = row["gain"]
        return told


def sample_row(groups: Sequence[RolloutGroup], most: int) -> list[dict[str, Any]]:
    """Return some groups of a step as text for people: prompt, replies, rewards."""
    by_spread = sorted(groups, key=lambda g: (not g.is_informative(), g.group_id))
    return [
        {
            "task_id": group.task.task_id,
            "prompt": group.task.text[:_LONGEST],
            "replies": [
                {
                    "text": "\n\n".join(m.content for m in r.messages)[:_LONGEST],
                    "reward": r.reward,
                    "cut": r.is_truncated,
                }
                for r in group.rollouts[:_REPLIES]
            ],
        }
        for group in by_spread[:most]
    ]
