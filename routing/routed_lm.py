"""An LM that asks the router which LM to call, fails over, and lets failing ones rest.

Works over any backend spec of the project: the names of the router's models are the keys of `lms`.
A failure that speaks of the host moves on to the next model of the ranking and starts its cooldown;
a failure that speaks of the request is raised as it is. The reason of the last choice, failover
included, is told to `on_decision`.
Does not know prompts' meaning, budgets or retries of one host. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.lm import open_lm
from tfgrpo.protocols import LM, Completion, Request
from tfgrpo.routing.router import Router
from tfgrpo.routing.rules import RouteDecision
from tfgrpo.runtime.canonical import digest
from tfgrpo.runtime.cooldown import COUNTED, Cooldowns

__all__ = ["RoutedLM"]


class RoutedLM:
    """Routes every request among several LMs; an `LM` itself."""

    def __init__(
        self,
        router: Router,
        lms: Mapping[str, LM],
        *,
        cooldowns: Cooldowns | None = None,
        reads: Literal["all", "last"] = "all",
        on_decision: Callable[[RouteDecision, str], None] = lambda decision, used: None,
    ) -> None:
        """Join a router and its LMs.

        Args:
            router: chooses; its models must be keys of `lms`.
            lms: name to LM.
            cooldowns: health of the hosts; default the router's own, or 60 s after one failure.
            reads: what is routed on: the whole conversation, or the last user message alone.
            on_decision: told each decision and the model that answered in the end.
        """
        missing = [name for name in router.model_names if name not in lms]
        if missing:
            raise ConfigError(
                f"the router knows {missing}, for which there is no LM: add them to lms"
            )
        self._router, self._lms = router, dict(lms)
        self._cooldowns = cooldowns or router.cooldowns or Cooldowns()
        self._told, self._reads = on_decision, reads

    @classmethod
    def open(
        cls, router: Router, specs: Mapping[str, str] | None = None, **options: Any
    ) -> RoutedLM:
        """Open the LMs of the router's models by spec; the default spec is the model's own name."""
        found = specs or {}
        lms = {name: open_lm(found.get(name, name)) for name in router.model_names}
        return cls(router, lms, **options)

    @property
    def model_id(self) -> str:
        """`routed:` and the names of the models."""
        return "routed:" + ",".join(self._router.model_names)

    @property
    def identity(self) -> Mapping[str, Any]:
        """The identities of the LMs; what was learnt so far is not part of it."""
        return {
            "backend": "routed",
            "models": {name: dict(self._lms[name].identity) for name in self._router.model_names},
            "digest": digest(list(self._router.model_names), 8),
        }

    @property
    def prefers_n(self) -> bool:
        """True when every LM prefers one call for n draws."""
        return all(self._lms[name].prefers_n for name in self._router.model_names)

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return replies of the first model of the ranking that answers.

        Raises:
            ProviderError: the request itself is wrong, or every model failed; the last failure.
            NoneHealthyError: all are cooling down and the cooldowns say raise.
        """
        said = [m for m in request.messages if m.role != "system"]
        prompt = "\n".join(m.content for m in said) or "."
        asked = [m.content for m in said if m.role == "user"]
        question = asked[-1] if asked and self._reads == "last" else None
        # In a thread: the first ask fits states, and no other call of the loop may wait for it.
        decision = await asyncio.to_thread(self._router.ask, prompt, question=question)
        ranked = [decision.model, *(c.model for c in decision.ranking if c.model != decision.model)]
        last: ProviderError | None = None
        ready = self._cooldowns.available(ranked)
        all_rest = all(self._cooldowns.state(name) == "cooling" for name in ready)
        for name in ready:
            if self._cooldowns.state(name) == "cooling" and last is not None and not all_rest:
                continue
            self._cooldowns.started(name)
            try:
                replies = await self._lms[name].complete(request, n, seeds)
            except ProviderError as error:
                self._cooldowns.failed(name, error)
                if error.kind not in COUNTED:
                    raise
                last = error
                continue
            except asyncio.CancelledError:
                self._cooldowns.abandoned(name)
                raise
            self._cooldowns.succeeded(name)
            self._told(decision, name)
            return replies
        assert last is not None
        raise last

    async def aclose(self) -> None:
        """Close every LM."""
        for lm in self._lms.values():
            await lm.aclose()
