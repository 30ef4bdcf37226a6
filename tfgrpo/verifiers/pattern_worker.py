"""The process that tries users' regular expressions: one JSON request a line, one JSON reply.

Matching can take for ever and cannot be interrupted from inside; here the parent's wall clock ends
it. Runs as a script of its own and imports nothing of ours. Source: own.
"""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return whether a pattern matches, or its last match (its first group, where it has any)."""
    pattern = re.compile(request["pattern"], request["flags"])
    if request["mode"] == "last":
        last = deque(pattern.finditer(request["text"]), maxlen=1)
        if not last:
            return {"found": None}
        groups = last[0].groups()
        return {"found": next((g for g in groups if g is not None), "") if groups else last[0][0]}
    found = (pattern.fullmatch if request["mode"] == "full" else pattern.search)(request["text"])
    return {"found": found is not None}


def main() -> None:
    """Serve requests until the parent closes the pipe."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except (re.error, MemoryError, RecursionError, OverflowError) as exc:
            reply = {"error": f"{type(exc).__name__}: {exc}"[:500]}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
