"""Reading operations under the switches of defects 1 to 4, each on or off alone.

With every repair on this is `edits.read_operations`; with every repair off it reads as the
published code does. Does not know how replies are asked for.
Source: behaviour of youtu-agent's `ExperienceUpdater`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tfgrpo.experience.edits import (
    Operations,
    RejectedRow,
    exact,
    operations_of,
    read_operations,
    resolve,
)
from tfgrpo.experience.settings import Repairs
from tfgrpo.runtime.lenient_json import ReplyError

_BLOCK = re.compile(r"```(?:json)?(.*?)```", re.DOTALL)
_NAMES = {
    "operation": frozenset({"ADD", "UPDATE", "MODIFY", "MERGE", "DELETE", "NONE"}),
    "op": frozenset({"add", "update", "delete", "keep", "drop"}),
}
"""The spellings that the prompts show: the published ones, and those of the default flow."""


def operations_from(
    text: str,
    labels: Mapping[str, str],
    repairs: Repairs,
    *,
    proposals: Mapping[str, str] | None = None,
) -> Operations:
    """Read a reply's operations.

    Raises:
        ReplyError: nothing usable.
    """
    if not repairs.grounded_merge:
        text = _last_block(text)
    resolver = resolve if repairs.id_aliases else exact
    if repairs.lenient_operations:
        found = read_operations(text, labels, proposals=proposals, resolver=resolver)
    else:
        rows, misnamed = _published_rows(text)
        found = operations_of(rows, labels, proposals or {}, False, resolver)
        found = Operations(found.operations, (*misnamed, *found.rejected))
    if repairs.delete_by_id:
        return found
    bare = [o for o in found.operations if o.edit.op == "delete" and not o.edit.text]
    kept = tuple(o for o in found.operations if o not in bare)
    lost = (
        RejectedRow(f"delete {o.edit.target}", "a delete without content is ignored") for o in bare
    )
    return Operations(kept, (*found.rejected, *lost))


def _last_block(text: str) -> str:
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def _published_rows(text: str) -> tuple[list[Any], list[RejectedRow]]:
    rows: list[Any] = []
    ignored: list[RejectedRow] = []
    for block in _BLOCK.findall(text) or [text]:
        try:
            decoded = json.loads(block)
        except (ValueError, RecursionError) as exc:
            raise ReplyError(f"not JSON: {exc}") from exc
        if not isinstance(decoded, list) or not all(isinstance(row, dict) for row in decoded):
            raise ReplyError("not a JSON array of objects")
        for row in decoded:
            if any(str(row.get(key)) in names for key, names in _NAMES.items()):
                rows.append(row)
            else:
                ignored.append(RejectedRow(repr(row)[:160], "operation name not spelt as shown"))
    return rows, ignored
