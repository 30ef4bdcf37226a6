"""The process that parses and compares mathematics: one JSON request a line, one JSON reply.

Runs as a script of its own and imports nothing of ours. Parsing model text can take for ever or
all memory; here the parent's wall clock and a memory limit end it. Does not know time limits.
Source: math-verify does the work; its own alarms are off, since they need the main thread.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
from typing import Any

MEMORY_BYTES = 4 << 30


def main() -> None:
    """Serve requests until the parent closes the pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.set_int_max_str_digits(0)  # the parent's clock bounds what long integers take
    logging.disable(logging.CRITICAL)
    replies = sys.stdout
    sys.stdout = sys.stderr
    from math_verify import parse, verify  # type: ignore[import-untyped]  # slow: once a process

    def read(text: str) -> list[Any]:
        return list(parse(text, parsing_timeout=None))

    def answer(request: dict[str, str]) -> dict[str, Any]:
        gold = read(request["gold"])
        is_expression = any(not isinstance(g, str) for g in gold)
        if "answer" not in request:
            return {"parsed": is_expression}
        given = read(request["answer"])
        if not given:
            return {"parsed": False}
        # The gold comes first: the comparison is not symmetric.
        equal = verify(gold, given, timeout_seconds=None, raise_on_error=False)
        return {"parsed": True, "equal": bool(equal), "shown": str(given[-1])[:200]}

    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError) as exc:
            reply = {"error": f"{type(exc).__name__}: {exc}"[:500]}
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as exc:
            reply = {"error": f"{type(exc).__name__}: {exc}"[:500]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
