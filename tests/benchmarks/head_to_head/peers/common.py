"""What every rival's script needs: its job from standard input, the bench's address, its result.

Runs in the rival's own environment: standard library only, nothing of tfgrpo.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Job:
    """One learning run of a rival."""

    url: str
    model: str
    seed: int
    system: str
    train: list[dict[str, Any]]
    choose: list[dict[str, Any]]
    budget_tokens: int
    deadline_s: float
    temperature: float
    max_tokens: int
    critic: str = ""
    """The model that reflects; empty for the one that acts."""
    critic_tokens: int = 300
    metric_calls: int | None = None
    minibatch: int | None = None
    steps: int | None = None
    """Sizes in a rival's own terms; None leaves them to its script."""
    tell: bool = True
    """False keeps references from the rival; feedback says then what is right and wrong alone."""
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def read(cls) -> Job:
        """Read the job that the harness wrote to standard input."""
        return cls(**json.load(sys.stdin))

    @property
    def api_base(self) -> str:
        """Address of the OpenAI-compatible server."""
        return f"{self.url}/v1"

    @property
    def writer(self) -> str:
        """The model that reflects."""
        return self.critic or self.model

    def grade(self, task_id: str, reply: str) -> tuple[float, str]:
        """Return reward and feedback of a reply, as every method gets them."""
        row = self._post("grade", {"task_id": task_id, "reply": reply})
        return float(row["reward"]), str(row["feedback"])

    def spent(self) -> int:
        """Return the tokens counted at the server."""
        with urllib.request.urlopen(f"{self.url}/spent", timeout=60) as reply:
            return int(json.load(reply)["tokens"])

    def is_over(self) -> bool:
        """True when tokens or time are used up."""
        late = time.monotonic() - self.started > self.deadline_s
        return late or self.spent() >= self.budget_tokens

    def _post(self, path: str, row: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/{path}",
            data=json.dumps(row).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer


def finish(system: str, turns: list[tuple[str, str]] | None = None, note: str = "") -> None:
    """Print the learnt artefact as the last line of standard output."""
    print(json.dumps({"system": system, "turns": turns or [], "note": note}), flush=True)
