"""A deterministic LM whose replies are given by the caller, for tests and offline examples.

Does not know tokens: usage counts words. Idea: a mock that ships with the package, so that users
test their own pipeline without a key (own).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfgrpo.errors import ProviderError
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Usage
from tfgrpo.runtime.canonical import digest

Reply = str | Completion | ProviderError
Script = Callable[[Request, int | None], Reply] | Sequence[Reply] | Mapping[str, Reply] | str


class ScriptedLM:
    """Replies by script: a function of (request, seed), a list used up in order, a mapping from
    the last user text to a reply, or one fixed reply. A `ProviderError` in the script is raised.

    Args:
        script: where replies come from; a function should depend on its arguments alone.
        model_id: name in ledgers.
        latency_s: how long each call takes, in seconds.
    """

    def __init__(
        self, script: Script, *, model_id: str = "scripted:test", latency_s: float = 0.0
    ) -> None:
        self._script = script
        self._model_id = model_id
        self._latency_s = latency_s
        self._next = 0
        self.requests: list[Request] = []
        """Every request received, in order of arrival; one entry a draw."""

    @property
    def model_id(self) -> str:
        """The name given at construction."""
        return self._model_id

    @property
    def identity(self) -> Mapping[str, Any]:
        """Backend and name; the script itself is not part of it."""
        return {"backend": "scripted", "model": self._model_id}

    @property
    def prefers_n(self) -> bool:
        """False: a scripted draw costs nothing."""
        return False

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return n scripted replies; raises the `ProviderError` that the script gives."""
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        return [self._one(request, seed) for seed in list(seeds)[:n]]

    def _one(self, request: Request, seed: int | None) -> Completion:
        self.requests.append(request)
        reply = self._reply(request, seed)
        if isinstance(reply, ProviderError):
            raise reply
        if isinstance(reply, Completion):
            return reply
        prompt_words = sum(len(m.content.split()) for m in request.messages)
        usage = Usage(uncached_tokens=prompt_words, text_tokens=len(reply.split()), calls=1)
        return Completion(reply, usage=usage, model=self._model_id)

    def _reply(self, request: Request, seed: int | None) -> Reply:
        script = self._script
        if isinstance(script, str):
            return script
        if callable(script):
            return script(request, seed)
        if isinstance(script, Mapping):
            text = request.messages[-1].content
            if text not in script:
                raise ProviderError(
                    f"the script has no reply to {text!r:.200} ({len(script)} keys, "
                    f"digest {digest(sorted(script), 8)})",
                    kind="bad_request",
                )
            return script[text]
        if self._next >= len(script):
            raise ProviderError(
                f"the script's {len(script)} replies are used up", kind="bad_request"
            )
        self._next += 1
        return script[self._next - 1]

    async def aclose(self) -> None:
        """Nothing to free."""
