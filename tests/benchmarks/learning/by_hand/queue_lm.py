"""An LM whose replies are written by others: requests and answers are files of a folder.

`FOLDER/ROLE/pending/ID.json` holds a request, `FOLDER/ROLE/done/ID.json` a list of its answers.
Prompts of the policy that hold something learnt go to a role of their own, so that another writer
answers them. Does not know who writes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.learning.house_rules.model import Account, tokens
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Usage

POLL_S = 0.3


class Queue:
    """The folder of one learning run.

    Args:
        folder: made where it is absent.
        bare: the system text of a prompt that holds nothing learnt.
    """

    def __init__(self, folder: Path, bare: str) -> None:
        self.folder, self._bare = folder, bare
        self.account = Account()
        self._count = 0

    async def ask(self, role: str, messages: list[dict[str, str]], n: int) -> list[str]:
        """Return n answers to a prompt, once somebody has written them."""
        queue = self._role(role, messages)
        for name in ("pending", "done"):
            (self.folder / queue / name).mkdir(parents=True, exist_ok=True)
        self._count += 1
        ident = f"{self._count:05d}"
        row = {"id": ident, "n": n, "max_tokens": None, "messages": messages}
        asked = self.folder / queue / "pending" / f"{ident}.json"
        asked.with_suffix(".part").write_text(json.dumps(row))
        asked.with_suffix(".part").rename(asked)
        done = self.folder / queue / "done" / f"{ident}.json"
        while not done.exists():
            await asyncio.sleep(POLL_S)
        answers = [str(a) for a in json.loads(done.read_text())]
        answers = (answers + [answers[-1]] * n)[:n]
        sent = tokens("".join(m["content"] for m in messages))
        self.account.prompt_tokens += sent * n
        self.account.completion_tokens += sum(tokens(a) for a in answers)
        self.account.calls[role] += n
        return answers

    def _role(self, role: str, messages: list[dict[str, str]]) -> str:
        if role != "policy":
            return role
        system = "".join(m["content"] for m in messages if m["role"] == "system")
        is_bare = system.strip() in ("", self._bare.strip()) and len(messages) <= 2
        return "policy" if is_bare else "policy-lessons"


class QueueLM:
    """One role of a queue as `tfgrpo.protocols.LM`."""

    prefers_n = True

    def __init__(self, queue: Queue, role: str) -> None:
        self._queue, self._role = queue, role

    @property
    def model_id(self) -> str:
        """The role."""
        return f"by-hand:{self._role}"

    @property
    def identity(self) -> Mapping[str, Any]:
        """The role and the folder."""
        return {"backend": "by hand", "role": self._role, "folder": self._queue.folder.name}

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return n answers."""
        messages = [{"role": m.role, "content": m.content} for m in request.messages]
        answers = await self._queue.ask(self._role, messages, n)
        sent = tokens("".join(m["content"] for m in messages))
        read = [sent] + [0] * (len(answers) - 1)
        return [
            Completion(a, usage=Usage(uncached_tokens=r, text_tokens=tokens(a), calls=int(r > 0)))
            for a, r in zip(answers, read, strict=True)
        ]

    async def aclose(self) -> None:
        """Nothing to close."""
