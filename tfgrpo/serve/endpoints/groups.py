"""Client groups and tasks: closed early by call, and the refusals that follow from that.

Does not know how groups are made (`learning.grouping`). Source: own.
"""

from __future__ import annotations

import time

from tfgrpo.errors import StoreError
from tfgrpo.serve import tables
from tfgrpo.serve.exchange import digest_of
from tfgrpo.serve.gateway import Gateway
from tfgrpo.serve.identity import Extensions
from tfgrpo.serve.routes import Route
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.serve.wire.http import Http

__all__ = ["check_identities", "close"]


async def close(gateway: Gateway, http: Http, key_name: str, group_id: str) -> None:
    """`POST /tfgrpo/v1/groups/{id}/close`: nothing more is added to it."""
    rows = gateway.journal.writer.read(
        "SELECT route FROM requests WHERE group_id = ? AND group_id <> '' AND key = ? LIMIT 1",
        (group_id, key_name),
    )
    if not rows:
        raise ApiError("unknown_response", f"no group {group_id!r:.80} is known here")
    route = rows[0][0]
    if not _is_closed(gateway, route, group_id):
        row = (tables.NOTE, (time.time(), "group_closed", group_id, route))
        try:
            await gateway.journal.writer.commit([row])
        except StoreError as exc:
            gateway.journal.writer.drop([row])
            raise ApiError("storage", f"the journal cannot be written: {exc}") from exc
    await http.json(200, {"id": group_id, "object": "group", "closed": True})


def _is_closed(gateway: Gateway, route: str, group_id: str) -> bool:
    return bool(
        gateway.journal.writer.read(
            "SELECT 1 FROM notes WHERE kind = 'group_closed' AND name = ? AND body = ? LIMIT 1",
            (group_id, route),
        )
    )


def check_identities(
    gateway: Gateway, route: Route, ext: Extensions, turns: object, key_name: str
) -> None:
    """Refuse what is added to a closed group, and on strict routes other messages under a task id.

    Raises:
        ApiError: 409.
    """
    if ext.group_id and _is_closed(gateway, route.name, ext.group_id):
        raise ApiError("group_closed", f"the group {ext.group_id!r} is closed")
    if not (route.settings.groups.strict and ext.task_id) or ext.session_id:
        return
    since = time.time() - route.settings.groups.repeat_h * 3600.0
    rows = gateway.journal.writer.read(
        "SELECT task_digest FROM requests WHERE task_id = ? AND task_id <> '' AND route = ?"
        " AND key = ? AND at >= ? ORDER BY at LIMIT 1",
        (ext.task_id, route.name, key_name, since),
    )
    if rows and rows[0][0] != digest_of(turns):
        raise ApiError(
            "task_changed", f"the task {ext.task_id!r} had other messages: give it another id"
        )
