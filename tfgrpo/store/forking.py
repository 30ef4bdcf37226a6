"""A new run that takes over what another has paid for, under its content keys.

Replies are found again wherever the same request would be made, rollouts wherever policy, task,
context, seed and verifier are the same: whatever the changed settings touch has another key and is
made anew. Spend stays with the run that paid.

Does not know which settings changed. Source: own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfgrpo.store.budget import Budget
from tfgrpo.store.disk.files import store_errors
from tfgrpo.store.journal import FILE, Journal, OpenOptions
from tfgrpo.store.postgres.address import is_address
from tfgrpo.store.postgres.opening import list_runs
from tfgrpo.store.postgres.places import Place, place_of

_COPIED = (
    "INSERT INTO completions (key, call, finish, body, digest)"
    " SELECT key, NULL, finish, body, digest FROM old.completions ORDER BY completion",
    "INSERT INTO rollouts (rollout_id, verifier_id, group_id, task_id, outcome, reward, truncated,"
    " body, digest) SELECT rollout_id, verifier_id, group_id, task_id, outcome, reward, truncated,"
    " body, digest FROM old.rollouts"
    " WHERE outcome NOT IN ('provider_failed', 'verifier_failed', 'cancelled') ORDER BY rollout",
)


def fork_run(
    folder: Path | str,
    config: Mapping[str, Any],
    *,
    store: str = "",
    budget: Budget | None = None,
    durable: bool = False,
) -> Journal:
    """Make `NAME-forkN` beside a run, fill it with the run's finished work and return it open.

    Closed groups and decisions are not taken over: they belong to the run that made them.
    """
    source = place_of(folder, store)
    target = _unused(source, has_folder=not is_address(folder))
    address = "" if target.address is None else target.address.whole
    journal = Journal.open(
        address if is_address(folder) else target.folder,
        create=True,
        config=config,
        budget=budget,
        options=OpenOptions(store=address, durable=durable),
    )
    with store_errors(source.folder / FILE, "copy from"):
        journal.take_over(source, _COPIED)
    return journal


def _unused(source: Place, *, has_folder: bool) -> Place:
    """Return the first place `NAME-forkN` that nothing is in."""
    taken = [] if source.address is None else list_runs(source.address)
    for number in itertools.count(1):
        folder = source.folder.with_name(f"{source.folder.name}-fork{number}")
        if source.address is None:
            target = Place(folder)
        else:
            target = Place(folder, source.address.named(f"{source.address.run}-fork{number}"))
            if target.address is not None and target.address.run in taken:
                continue
        if not (has_folder and folder.exists()):
            return target
    raise AssertionError("numbers do not end")
