"""One row for each run in a list: what it is, when it changed, what came of it.

Does not know how rows are shown. Source: own.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from tfgrpo.diagnosis import outcome_of
from tfgrpo.errors import StoreError
from tfgrpo.rollout import Usage
from tfgrpo.store.disk.listing import kept_state
from tfgrpo.store.journal import FILE, Journal
from tfgrpo.store.postgres.address import is_address
from tfgrpo.store.postgres.places import is_run, shown

__all__ = ["METRICS", "run_row", "training_row", "when_words"]

METRICS = "metrics.jsonl"
"""What a training run writes each step."""
_OURS = (FILE, f"{FILE}-wal")


def run_row(run: Path | str) -> dict[str, Any]:
    """Return what a run has come to: when, what was kept, gain, calls, money.

    Where its journal cannot be read the row has an `error` alone.
    """
    if not is_address(run) and not is_run(Path(run)):
        return training_row(Path(run))
    kept = None if is_address(run) else kept_state(Path(run), ("final", "result"))
    try:
        if kept is not None:
            (state, newest, damaged), kept_in = kept, None
        else:
            with Journal.open(run, readonly=True) as store:
                state, damaged, kept_in = store.state(), list(store.damaged), store.place.address
                found = {kind: store.decisions(kind) for kind in ("final", "result")}
                newest = {kind: rows[-1][1] for kind, rows in found.items() if rows}
    except StoreError as exc:
        return {"run": shown(run), "error": str(exc)}
    final, result = newest.get("final"), newest.get("result") or {}
    settled, booked = Usage(), Usage()
    for row in state.spend:
        settled, booked = settled + row.usage, booked + row.booked
    size = None
    if kept_in is None:
        files = [Path(run) / name for name in _OURS]
        size = sum(file.stat().st_size for file in files if file.exists())
    learnt = "step" in state.decisions or final is not None
    outcome = outcome_of(final, bool(state.library_id))
    return {
        "run": shown(run),
        "store": "" if kept_in is None else str(kept_in),
        "changed": when_words(state.changed_at),
        "state": outcome.state if learnt else "",
        "verdict": result.get("verdict"),
        "gain": result.get("gain"),
        "rollouts": state.rollouts,
        "groups": state.groups,
        "outcomes": dict(state.outcomes),
        "calls": settled.calls,
        "tokens": settled.total_tokens,
        "cost_usd": settled.cost_usd,
        "booked_usd": booked.cost_usd,
        "library": state.library_id,
        "sessions": state.sessions,
        "interruptions": state.interruptions,
        "seconds": round(state.seconds, 3),
        "bytes": size,
        "damaged": damaged,
    }


def training_row(folder: Path) -> dict[str, Any]:
    """Return what a training run wrote of its last step."""
    file = folder / METRICS
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    row: dict[str, Any] = {
        "run": str(folder),
        "changed": when_words(file.stat().st_mtime),
    }
    try:
        last = json.loads(lines[-1]) if lines else {}
    except ValueError:
        last = {}
    return row | {"trained_steps": last.get("step", 0), "reward_mean": last.get("reward_mean")}


def when_words(seconds: float) -> str:
    """Return a moment in local time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
