"""Optional OpenTelemetry spans around calls, with the GenAI attribute names. Off unless used.

Wrap the raw LM, below the journal, so that a span is a call that was made. Message content is
captured only on request. The conventions are still marked experimental: their names stand in this
file and nowhere else. Exporting is the SDK's business: its batch processor drops what it cannot
send, so that a dead collector never stops a run.

Does not know journals or money. Source: OpenTelemetry semantic conventions for generative AI.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tfgrpo.errors import MissingExtraError, ProviderError
from tfgrpo.protocols import LM, Completion, LMWrapper, Request
from tfgrpo.rollout import Usage
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.runtime.redaction import redact

_OPERATION = "chat"


class TracedLM(LMWrapper):
    """An `LM` that opens one client span a call.

    Args:
        lm: the LM to ask.
        tracer: an OpenTelemetry tracer; None takes the process's.
        capture_content: also record prompts and replies, redacted; they may hold private data.

    Raises:
        MissingExtraError: no tracer is given and OpenTelemetry is not installed.
    """

    def __init__(self, lm: LM, tracer: Any = None, *, capture_content: bool = False) -> None:
        super().__init__(lm)
        self._tracer = tracer if tracer is not None else _process_tracer()
        self._capture_content = capture_content

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return the wrapped LM's replies; raises as it does, with the failure on the span."""
        name = f"{_OPERATION} {self.model_id}"
        with self._tracer.start_as_current_span(
            name, record_exception=False, set_status_on_exception=False
        ) as span:
            span.set_attributes(_request_attributes(self.model_id, request, n, seeds))
            if self._capture_content:
                span.set_attribute("gen_ai.input.messages", _messages_text(request))
            try:
                replies = await self._lm.complete(request, n, seeds)
            except ProviderError as exc:
                span.set_attribute("error.type", exc.kind)
                span.set_status(_error_status(redact(str(exc))))
                raise
            span.set_attributes(_reply_attributes(replies))
            if self._capture_content:
                texts = json.dumps([redact(r.text) for r in replies])
                span.set_attribute("gen_ai.output.messages", texts)
            return replies


def _process_tracer() -> Any:
    try:
        from opentelemetry import trace
    except ImportError as exc:
        raise MissingExtraError.of("otel", "tracing", "opentelemetry") from exc
    return trace.get_tracer("tfgrpo")


def _error_status(text: str) -> Any:
    from opentelemetry.trace import Status, StatusCode

    return Status(StatusCode.ERROR, text[:300])


def _request_attributes(
    model_id: str, request: Request, n: int, seeds: Sequence[int | None]
) -> dict[str, Any]:
    sampling, scope = request.sampling, current_scope()
    backend, _, model = model_id.partition(":")
    if "#" in model_id:
        backend, model = "openai_compatible", model_id.rsplit("#", 1)[1]
    elif backend == "litellm":
        backend, _, model = model.partition("/")
    seed = seeds[0] if n == 1 else None
    values: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATION,
        "gen_ai.provider.name": backend,
        "gen_ai.request.model": model or model_id,
        "gen_ai.request.choice.count": n if n != 1 else None,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.seed": seed,
        "tfgrpo.stage": scope.stage,
        "tfgrpo.task_id": scope.task_id or None,
        "tfgrpo.rollout_id": scope.rollout_id or None,
        "tfgrpo.sample_index": scope.sample_index,
    }
    return {name: value for name, value in values.items() if value is not None}


def _reply_attributes(replies: Sequence[Completion]) -> dict[str, Any]:
    usage = sum((r.usage for r in replies), Usage())
    values: dict[str, Any] = {
        "gen_ai.response.finish_reasons": [r.finish for r in replies],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cache_read_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
    }
    if replies and replies[0].model:
        values["gen_ai.response.model"] = replies[0].model
    return values


def _messages_text(request: Request) -> str:
    return json.dumps([{"role": m.role, "content": redact(m.content)} for m in request.messages])
