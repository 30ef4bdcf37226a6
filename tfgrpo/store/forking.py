"""A new run that takes over what another has paid for, under its content keys.

Replies are found again wherever the same request would be made, rollouts wherever policy, task,
context, seed and verifier are the same: whatever the changed settings touch has another key and is
made anew. Spend stays with the run that paid.

Does not know which settings changed. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfgrpo.store.budget import Budget
from tfgrpo.store.database import store_errors
from tfgrpo.store.journal import FILE, Journal

_COPIED = (
    "INSERT INTO completions (key, call, finish, body, digest)"
    " SELECT key, NULL, finish, body, digest FROM old.completions ORDER BY completion",
    "INSERT INTO rollouts (rollout_id, verifier_id, group_id, task_id, outcome, reward, truncated,"
    " body, digest) SELECT rollout_id, verifier_id, group_id, task_id, outcome, reward, truncated,"
    " body, digest FROM old.rollouts"
    " WHERE outcome NOT IN ('provider_failed', 'verifier_failed', 'cancelled') ORDER BY rollout",
)


def fork_run(
    folder: Path,
    config: Mapping[str, Any],
    *,
    budget: Budget | None = None,
    durable: bool = False,
) -> Journal:
    """Make `NAME-forkN` beside a run, fill it with the run's finished work and return it open.

    Closed groups and decisions are not taken over: they belong to the run that made them.
    """
    number = 1
    while (target := folder.with_name(f"{folder.name}-fork{number}")).exists():
        number += 1
    store = Journal.open(target, create=True, config=config, budget=budget, durable=durable)
    source = folder / FILE
    with store_errors(source, "copy from"):
        store.take_over(source, _COPIED)
    return store
