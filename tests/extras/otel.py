"""`otel`: a call becomes a span."""

import asyncio

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tfgrpo import open_lm
from tfgrpo.messages import Message
from tfgrpo.protocols import Request
from tfgrpo.store import TracedLM

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
lm = TracedLM(open_lm("scripted:echo"), provider.get_tracer("bare"))
asyncio.run(lm.complete(Request((Message("user", "hello"),)), 1, [0]))
assert [s.name for s in exporter.get_finished_spans()] == ["chat scripted:echo"]
assert TracedLM(open_lm("scripted:echo")).model_id == "scripted:echo"
