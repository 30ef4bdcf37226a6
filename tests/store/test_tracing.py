"""Spans with the GenAI names, checked with the SDK's in-memory exporter. F30, T1, T15."""

from __future__ import annotations

from typing import Any

import pytest

from tfgrpo.errors import ProviderError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request, Sampling
from tfgrpo.rollout import Usage
from tfgrpo.runtime.call_scope import CallScope, call_scope
from tfgrpo.runtime.redaction import forget_secrets, register
from tfgrpo.store import TracedLM

pytest.importorskip("opentelemetry.sdk", reason="the OpenTelemetry SDK is not installed")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)

ASK = Request((Message("user", "a private question"),), sampling=Sampling(0.7, 0.9, max_tokens=20))
REPLY = Completion(
    "a private answer",
    usage=Usage(5, 7, 11, 2, 1, calls=1),
    model="m-2026",
)


def tracer() -> tuple[Any, InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test"), exporter


async def test_a_call_is_a_span_with_the_agreed_names_and_no_content() -> None:
    spans, exporter = tracer()
    lm = TracedLM(ScriptedLM([REPLY], model_id="litellm:xai/grok"), spans)
    with call_scope(CallScope("practice", "t1", "r1", 3)):
        assert await lm.complete(ASK, 1, [42]) == [REPLY]
    span = exporter.get_finished_spans()[0]
    assert span.name == "chat litellm:xai/grok"
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "xai",
        "gen_ai.request.model": "grok",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.seed": 42,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.model": "m-2026",
        "gen_ai.usage.input_tokens": 23,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 7,
        "gen_ai.usage.cache_creation.input_tokens": 11,
        "tfgrpo.stage": "practice",
        "tfgrpo.task_id": "t1",
        "tfgrpo.rollout_id": "r1",
        "tfgrpo.sample_index": 3,
    }


async def test_content_is_captured_on_request_and_redacted() -> None:
    register("CANARY-7f3a9c51d2e84b60")
    try:
        spans, exporter = tracer()
        leaky = ScriptedLM(["it is CANARY-7f3a9c51d2e84b60"])
        await TracedLM(leaky, spans, capture_content=True).complete(ASK, 1, [1])
        attributes = dict(exporter.get_finished_spans()[0].attributes or {})
    finally:
        forget_secrets()
    assert "a private question" in str(attributes["gen_ai.input.messages"])
    assert attributes["gen_ai.output.messages"] == '["it is [redacted]"]'


async def test_a_failure_is_an_error_of_its_kind_without_secrets() -> None:
    register("CANARY-7f3a9c51d2e84b60")
    try:
        spans, exporter = tracer()
        error = ProviderError("no: key=CANARY-7f3a9c51d2e84b60", kind="auth", status=401)
        with pytest.raises(ProviderError):
            await TracedLM(ScriptedLM([error]), spans).complete(ASK, 1, [1])
        span = exporter.get_finished_spans()[0]
    finally:
        forget_secrets()
    assert (span.attributes or {})["error.type"] == "auth"
    assert span.status.is_ok is False
    assert "7f3a9c" not in span.to_json()
    assert not span.events


async def test_nothing_is_traced_by_default_and_a_dead_exporter_stops_no_call() -> None:
    class Dead(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            raise ConnectionError("the collector is down")

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Dead()))
    lm = TracedLM(ScriptedLM("fine"), provider.get_tracer("test"))
    assert (await lm.complete(ASK, 1, [1]))[0].text == "fine"
    assert (await TracedLM(ScriptedLM("untraced")).complete(ASK, 1, [1]))[0].text == "untraced"
