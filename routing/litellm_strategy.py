"""The router as a custom routing strategy of litellm's `Router`.

    install(litellm_router, router)

A request for a model group is answered by the deployment of that group which the router ranks
first; the router knows a deployment by its `litellm_params.model`, or by `model_info.id` where two
deployments share a model. Deployments that the router does not know are used only when it knows
none.
Does not know litellm's cooldowns and retries: they stay litellm's. Source: own.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import ConfigError, MissingExtraError
from tfgrpo.routing.router import Router

__all__ = ["install", "make_strategy"]


def _text(messages: Any, raw: Any) -> str:
    if isinstance(raw, str) and raw.strip():
        return raw
    if isinstance(raw, list) and raw:
        return "\n".join(str(item) for item in raw)
    parts = []
    for message in messages or []:
        if message.get("role") == "system":
            continue
        content = message.get("content")
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content, list):
            parts += [str(p["text"]) for p in content if isinstance(p, dict) and "text" in p]
    return "\n".join(parts) or "."


def _name(deployment: Mapping[str, Any], known: Sequence[str]) -> str | None:
    names = (
        (deployment.get("model_info") or {}).get("id"),
        (deployment.get("litellm_params") or {}).get("model"),
    )
    return next((str(n) for n in names if n in known), None)


def _deployments(litellm_router: Any, model: str) -> list[Any]:
    """The deployments of a model group, by whichever name this litellm has for them."""
    registry = getattr(litellm_router, "registry", None)
    if callable(registry):
        found = registry().deployments(model, team_id=None)
    else:
        found = litellm_router.get_model_list(model_name=model)
    return [d.model_dump() if hasattr(d, "model_dump") else d for d in found or []]


def make_strategy(litellm_router: Any, router: Router) -> Any:
    """Return a `CustomRoutingStrategyBase` that asks the router.

    Raises:
        MissingExtraError: litellm is not installed.
    """
    if importlib.util.find_spec("litellm") is None:
        raise MissingExtraError.of("litellm", "the litellm routing strategy", "litellm")
    from litellm.types.router import CustomRoutingStrategyBase

    class Strategy(CustomRoutingStrategyBase):  # type: ignore[misc]
        """Asks the router which deployment answers."""

        def get_available_deployment(
            self,
            model: str,
            messages: list[dict[str, str]] | None = None,
            input: str | list[Any] | None = None,
            specific_deployment: bool | None = False,
            request_kwargs: dict[str, Any] | None = None,
        ) -> Any:
            """Return the deployment of the group that the router ranks first."""
            group = _deployments(litellm_router, model)
            if not group:
                raise ConfigError(f"litellm's model group {model!r} has no deployment")
            named = {
                name: deployment
                for deployment in group
                if (name := _name(deployment, router.model_names)) is not None
            }
            if not named:
                return group[0]
            metadata = (request_kwargs or {}).get("metadata") or {}
            session = metadata.get("session_id")
            decision = router.ask(
                _text(messages, input),
                among=list(named),
                session=None if session is None else str(session),
            )
            return named[decision.model]

        async def async_get_available_deployment(
            self,
            model: str,
            messages: list[dict[str, str]] | None = None,
            input: str | list[Any] | None = None,
            specific_deployment: bool | None = False,
            request_kwargs: dict[str, Any] | None = None,
        ) -> Any:
            """Return the deployment of the group that the router ranks first."""
            return await asyncio.to_thread(
                self.get_available_deployment,
                model, messages, input, specific_deployment, request_kwargs,
            )  # fmt: skip

    return Strategy()


def install(litellm_router: Any, router: Router) -> None:
    """Make the router litellm's routing strategy, by whichever name this litellm has for it."""
    strategy = make_strategy(litellm_router, router)
    register = getattr(litellm_router, "register_plugin", None)
    if register is not None:
        register(strategy)
    else:
        litellm_router.set_custom_routing_strategy(strategy)
