"""Every row of the search module's acceptance table, in one file of results.

    TFGRPO_TREEQUEST=FOLDER TFGRPO_BFCL=FOLDER python -m tests.benchmarks.search.search [PART ...]

Parts: speed, treequest, waiting, optimality, replay, promises, environments, bfcl. With parts named
only those figures are measured anew and the others stay as they were recorded.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.benchmarks.record import RESULTS, record
from tests.benchmarks.search.search_bfcl import bfcl_figures
from tests.benchmarks.search.search_environments import environment_figures
from tests.benchmarks.search.search_optimality import (
    blocksworld_figures,
    game24_figures,
    replay_figures,
)
from tests.benchmarks.search.search_properties import (
    budget_figures,
    dropped_figures,
    resume_figures,
)
from tests.benchmarks.search.search_speed import (
    core_figures,
    driver_figures,
    treequest_figures,
    waiting_figures,
)

PARTS: dict[str, tuple[Callable[[], dict[str, Any]], ...]] = {
    "speed": (core_figures, driver_figures),
    "treequest": (treequest_figures,),
    "waiting": (waiting_figures,),
    "optimality": (blocksworld_figures, game24_figures),
    "replay": (replay_figures,),
    "promises": (budget_figures, resume_figures, dropped_figures),
    "environments": (environment_figures,),
    "bfcl": (bfcl_figures,),
}


def earlier() -> dict[str, Any]:
    """Return the figures on record."""
    path = RESULTS / "search.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {k: v for k, v in rows.items() if k not in ("date", "command", "commit", "processor")}


def main(parts: list[str]) -> None:
    """Measure and record."""
    unknown = [p for p in parts if p not in PARTS]
    if unknown:
        raise SystemExit(f"unknown parts {unknown}; there are {', '.join(PARTS)}")
    given = [f"{n}=FOLDER" for n in ("TFGRPO_TREEQUEST", "TFGRPO_BFCL") if n in os.environ]
    command = " ".join([*given, "python -m tests.benchmarks.search.search"])
    for name in parts or PARTS:
        for measure in PARTS[name]:
            found = measure()
            print(json.dumps(found), file=sys.stderr, flush=True)
            record("search", earlier() | found, command)


if __name__ == "__main__":
    main(sys.argv[1:])
