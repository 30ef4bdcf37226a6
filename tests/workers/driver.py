"""A run on worker processes, to be killed: `python -m tests.workers.driver FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.learning.worlds import World, settings
from tfgrpo.lm.scripted import ScriptedLM


class Slow(World):
    """Every call takes a moment, so that there is something to interrupt."""

    def opener(self, spec: str, **options: object) -> ScriptedLM:
        lm = super().opener(spec, **options)
        lm._latency_s = 0.05
        return lm


def run(folder: Path) -> None:
    """Run or continue, and print the library."""
    run = {"folder": str(folder / "run"), "executor": "processes", "concurrency": 4}
    result = Slow().learn(settings(folder, run=run, workers={"count": 2}))
    print(result.library.version_id)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
