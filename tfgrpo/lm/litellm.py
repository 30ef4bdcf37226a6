"""Other providers, through `litellm`: a thin adapter from its reply objects to ours.

Importing litellm in its default mode fetches a price table and may read the working directory's
`.env`; both are switched off before the import. Its retries are off and its default time-out
(6,000 s) is never used. Does not know prices or retries. Source: own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import MissingExtraError, ProviderError, ProviderFailure
from tfgrpo.lm.failures import body_failure, failure_kind, http_failure
from tfgrpo.lm.single_draws import draws_in_parallel
from tfgrpo.lm.usage import normalise_usage, share_usage, unseen_in
from tfgrpo.lm.wire import ChoiceParts, finished, prompt_bytes, reply_bytes, request_json, timed_out
from tfgrpo.protocols import Completion, Request
from tfgrpo.runtime.redaction import Secret, redact, redact_logs

_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no price table from the network
    "LITELLM_MODE": "PRODUCTION",  # no .env from the working directory
    "LITELLM_TELEMETRY": "False",
}
_KINDS: Mapping[str, ProviderFailure] = {
    "AuthenticationError": "auth",
    "PermissionDeniedError": "auth",
    "NotFoundError": "not_found",
    "RateLimitError": "rate_limit",
    "BudgetExceededError": "quota",
    "ContextWindowExceededError": "context_too_long",
    "ContentPolicyViolationError": "refused",
    "Timeout": "timeout",
    "APITimeoutError": "timeout",
    "APIConnectionError": "connection",
    "ServiceUnavailableError": "overloaded",
    "InternalServerError": "overloaded",
    "BadGatewayError": "overloaded",
    "BadRequestError": "bad_request",
    "UnprocessableEntityError": "bad_request",
    "UnsupportedParamsError": "bad_request",
    "JSONSchemaValidationError": "bad_reply",
    "APIResponseValidationError": "bad_reply",
}


def _import_litellm() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ[name] = value
    try:
        import litellm
    except ImportError as exc:
        raise MissingExtraError.of("litellm", "the litellm backend", exc.name or "litellm") from exc
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    litellm.num_retries = 0
    redact_logs("LiteLLM", "litellm", "openai", "httpx", "httpx2", "httpcore", "httpcore2")
    return litellm


class LiteLLM:
    """A model behind litellm. Importing it takes seconds; that happens at the first call.

    Args:
        model: `PROVIDER/MODEL`.
        api_key_env: environment variable of the key; None lets litellm read the provider's usual
            one.
        api_base: the provider's URL, where it is not the usual one.
        supports_n: True sends `n`; by default draws are parallel calls; few providers take it.
    """

    def __init__(
        self,
        model: str,
        *,
        api_key_env: str | None = None,
        api_base: str | None = None,
        supports_n: bool = False,
    ) -> None:
        self._model = model
        self._api_base = api_base
        self._supports_n = supports_n
        provider = model.partition("/")[0]
        usual = f"{provider.upper().replace('-', '_')}_API_KEY"
        self._key_variable = api_key_env or usual
        self._secret = Secret.from_environment(self._key_variable)
        self._sends_key = api_key_env is not None
        if self._sends_key and self._secret is None:
            raise ProviderError(
                f"no key: environment variable {api_key_env} is unset or empty", kind="auth"
            )

    @property
    def model_id(self) -> str:
        """The spec string."""
        return f"litellm:{self._model}"

    @property
    def identity(self) -> Mapping[str, Any]:
        """Backend, model, base URL and a fingerprint of the key."""
        return {
            "backend": "litellm",
            "model": self._model,
            "base_url": self._api_base or "",
            "credential": self._secret.fingerprint if self._secret else "",
        }

    @property
    def prefers_n(self) -> bool:
        """True only where `supports_n` was set."""
        return self._supports_n

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return n replies: one call where `n` is supported, else parallel calls."""
        if n == 1 or self._supports_n:
            return await self._call(request, n, seeds[0])
        return await draws_in_parallel(self._call(request, 1, seed) for seed in list(seeds)[:n])

    async def _call(self, request: Request, n: int, seed: int | None) -> list[Completion]:
        """Make one call; errors are raised outside the handler, so no foreign one hangs on it."""
        litellm = await asyncio.to_thread(_import_litellm)
        import openai

        body = request_json(request, self._model)
        if n > 1:
            body["n"] = n
        if seed is not None:
            body["seed"] = seed
        if self._api_base:
            body["api_base"] = self._api_base
        if self._sends_key and self._secret:
            body["api_key"] = self._secret.value
        seconds = request.limits.timeout_s
        # litellm's exceptions all derive from the openai client's.
        known = (openai.OpenAIError, litellm.exceptions.BudgetExceededError)
        try:
            async with asyncio.timeout(seconds):
                reply = await litellm.acompletion(
                    **body, timeout=seconds, num_retries=0, max_retries=0, drop_params=False
                )
            return self._completions(reply, request)
        except TimeoutError:
            failure = timed_out(self._where, "no whole reply", "timeout_s", seconds)
        except known as exc:
            failure = self._failure(exc)
        except ProviderError as exc:
            failure = exc
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            failure = ProviderError(
                redact(f"{self._where}: {type(exc).__name__}: {exc!s:.300}"), kind="bad_reply"
            )
        failure.__cause__ = failure.__context__ = None
        raise failure

    @property
    def _where(self) -> str:
        return f"model {self.model_id!r}" + (f" at {self._api_base}" if self._api_base else "")

    def _failure(self, exc: BaseException) -> ProviderError:
        name = type(exc).__name__
        status = getattr(exc, "status_code", None)
        status = status if isinstance(status, int) else None
        message = str(exc)
        kind = _KINDS.get(name)
        if kind is None:
            kind = failure_kind(status, message) if status else "connection"
        if kind in ("rate_limit", "bad_request"):
            kind = failure_kind(429 if kind == "rate_limit" else 400, message)
        headers = getattr(getattr(exc, "response", None), "headers", None) or {}
        source = f"from environment variable {self._key_variable}"
        hint = http_failure(
            status or 0, headers, message, where=self._where, key_source=source
        ).retry_after_s
        advice = f"; check the key ({source})" if kind == "auth" else ""
        return ProviderError(
            redact(f"{self._where}: {name}: {message[:300]}{advice}"),
            kind=kind,
            status=status,
            retry_after_s=hint,
        )

    def _completions(self, reply: Any, request: Request) -> list[Completion]:
        row = reply.model_dump()
        parts: list[ChoiceParts] = []
        for choice in row.get("choices") or ():
            one = ChoiceParts()
            one.add(choice, choice.get("message"))
            parts.append(one)
        if not parts:
            raise body_failure("bad_reply", str(row)[:300], "no choices", where=self._where)
        size = sum(map(reply_bytes, parts))
        good = finished(parts, self._where)
        usage = normalise_usage(
            row.get("usage"),
            prompt_chars=prompt_bytes(request),
            reply_chars=size,
            unseen=unseen_in(request.sampling.max_tokens, len(parts)),
        )
        if size > request.limits.max_reply_bytes:
            raise ProviderError(
                f"{self._where}: the reply is longer than limits.max_reply_bytes", kind="bad_reply"
            )
        shares = share_usage(usage, [reply_bytes(p) for p in good])
        return [
            p.completion(usage=share, model=str(row.get("model") or self._model))
            for p, share in zip(good, shares, strict=True)
        ]

    async def aclose(self) -> None:
        """Close litellm's clients of this process, where it was imported."""
        import sys

        litellm = sys.modules.get("litellm")
        close = getattr(litellm, "close_litellm_async_clients", None)
        if close is not None:
            await close()
