# ruff: noqa: SIM105, E501
"""Random and mutated input for every reader of foreign bytes: what escapes that is not ours.

Half of the inputs change a valid one in a few places (as bytes, or as a JSON tree), a tenth are
random bytes. Allowed are the package's own errors, and a critic's unusable reply (`ReplyError`),
which the asker sends back to the model. Anything else is `raw`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from tests.benchmarks.record import RESULTS, record
from tfgrpo.config.learn import Config
from tfgrpo.config.sections import apply_override
from tfgrpo.errors import TfgrpoError
from tfgrpo.experience import artefact as artefacts
from tfgrpo.experience import edits
from tfgrpo.experience.critic.paper_operations import operations_from
from tfgrpo.experience.reflect.reply import read_reply
from tfgrpo.experience.settings import Repairs
from tfgrpo.hints.writer import parse_levels, read_texts
from tfgrpo.lm.failures import http_failure
from tfgrpo.lm.openai_reply import ReplyReader
from tfgrpo.lm.parameters import Parameters
from tfgrpo.lm.usage import normalise_usage
from tfgrpo.messages import Message, ToolCall
from tfgrpo.policies.tool_calls import match_calls, parse_action
from tfgrpo.protocols import Request, ToolSpec
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task
from tfgrpo.routing.outcome_files import read_models, read_outcomes
from tfgrpo.runtime.canonical import digest
from tfgrpo.runtime.lenient_json import ReplyError
from tfgrpo.serve.endpoints.dialects import (
    CHAT,
    EMBEDDINGS,
    RESPONSES,
    check_system_turns,
    refuse_urls,
)
from tfgrpo.serve.identity import Place, read_extensions
from tfgrpo.serve.inject import Injection
from tfgrpo.serve.settings import GatewaySettings
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.serve.wire.events import ChatEvents, ResponseEvents
from tfgrpo.serve.wire.http import parse_object
from tfgrpo.store.export import read_groups
from tfgrpo.tasks.files import read_tasks
from tfgrpo.verifiers.judge import Scale, read_score

MOST = 100_000
SECONDS = 60.0
SEED = 20_261_129
FOLDER = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))

WEIRD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 10**400, -(10**30), 1e308, "", "x", "7" * 400, "\ud800", "\x00",
    "1e999", "NaN", [], {}, [[]], {"": None}, [None], ["a", 1], {"a": {"b": []}}, "\u2028", "E1",
)  # fmt: skip
TOKENS = (
    b'"', b"'", b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\r\n", b"\x00", b"\xff", b"=",
    b"\xed\xa0\x80", b"\xef\xbb\xbf", b"null", b"NaN", b"Infinity", b"1e999", b"-", b"\\ud800",
    b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"```", b"<think>", b"data: ", b"[DONE]", b"#", b".",
)  # fmt: skip


def changed_bytes(rng: random.Random, raw: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.randint(0, len(raw))
        end = min(len(raw), at + rng.choice((0, 1, 1, 2, 8, 40)))
        kind = rng.randrange(5)
        if kind == 0:
            raw = raw[:at] + bytes((rng.randrange(256),)) + raw[end:]
        elif kind == 1:
            raw = raw[:at] + raw[end:]
        elif kind == 2:
            raw = raw[:at] + raw[at:end] * rng.randint(2, 4) + raw[end:]
        elif kind == 3:
            raw = raw[:at] + rng.choice(TOKENS) + raw[end:]
        elif rng.random() < 0.3:
            raw = raw[:at]
    return raw


def changed_tree(rng: random.Random, tree: Any) -> Any:
    """Replace, remove, rename or repeat one to three values anywhere in a JSON tree."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        todo = [tree]
        while todo:
            node = todo.pop()
            keys = list(node) if isinstance(node, dict) else range(len(node))
            for key in keys:
                places.append((node, key))
                if isinstance(node[key], (dict, list)):
                    todo.append(node[key])
        if not places:
            return tree
        node, key = rng.choice(places)
        kind = rng.randrange(6)
        if kind < 3:
            node[key] = copy.deepcopy(rng.choice(WEIRD))
        elif kind == 3:
            del node[key]
        elif kind == 4 and isinstance(node, dict):
            node[rng.choice(("", "id", "type", "x", "\ud800", "name"))] = node.pop(key)
        else:
            other, its = rng.choice(places)
            try:
                node[key] = copy.deepcopy(other[its])
            except (KeyError, IndexError):
                pass  # the place was removed a moment ago
    return tree


def json_bytes(tree: Any) -> bytes:
    return json.dumps(tree).encode("utf-8", "surrogatepass")


class Reader:
    """What is read, from which valid inputs.

    Args:
        read: takes bytes.
        trees: valid inputs as JSON.
        texts: valid inputs as bytes.
        write: from a tree to bytes.
    """

    def __init__(
        self,
        read: Callable[[bytes], Any],
        trees: tuple[Any, ...] = (),
        texts: tuple[bytes, ...] = (),
        write: Callable[[Any], bytes] = json_bytes,
    ) -> None:
        self.read, self.trees, self.write = read, trees, write
        self.texts = (*texts, *(write(t) for t in trees))

    def input(self, rng: random.Random) -> bytes:
        kind = rng.random()
        if kind < 0.1:
            return rng.randbytes(rng.randint(0, 200))
        if self.trees and kind < 0.65:
            return self.write(changed_tree(rng, rng.choice(self.trees)))
        return changed_bytes(rng, rng.choice(self.texts))


REQUEST = Request((Message("user", "x"),))
COMPLETION = {
    "id": "c", "object": "chat.completion", "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "logprobs": {"content": [
        {"token": "a", "logprob": -0.1, "top_logprobs": [{"token": "a", "logprob": -0.1}]}]},
        "token_ids": [5], "message": {"role": "assistant", "content": "<think>a</think>4",
        "reasoning_content": "r", "refusal": None, "tool_calls": [{"id": "c1", "type": "function",
        "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "cost": 0.1,
              "prompt_tokens_details": {"cached_tokens": 1}},
    "prompt_token_ids": [1, 2],
}  # fmt: skip
DELTAS = [
    {"model": "m", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "c", "function": {
        "name": "f", "arguments": "{"}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {
        "arguments": "}"}}]}, "token_ids": [1]}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}},
]  # fmt: skip


def _stream_bytes(rows: Any) -> bytes:
    rows = rows if isinstance(rows, list) else [rows]
    return b"".join(b"data: " + json_bytes(r) + b"\n\n" for r in rows) + b"data: [DONE]\n\n"


async def _chunks(raw: bytes) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(raw), 100):
        yield raw[at : at + 100]


def _finish(reader: ReplyReader) -> None:
    usage = normalise_usage(reader.usage, prompt_chars=1, reply_chars=1)
    for parts in reader.choices.values():
        parts.completion(usage=usage, model=reader.model)


LOOP = asyncio.new_event_loop()


def read_body(raw: bytes) -> None:
    async def run() -> None:
        reader = ReplyReader(REQUEST, "here")
        async with aclosing(_chunks(raw)) as chunks:
            await reader.read_body(chunks)
        _finish(reader)

    LOOP.run_until_complete(run())


def read_stream(raw: bytes) -> None:
    async def run() -> None:
        reader = ReplyReader(REQUEST, "here")
        async with asyncio.timeout(None) as first, aclosing(_chunks(raw)) as chunks:
            await reader.read_stream(chunks, first)
        _finish(reader)

    LOOP.run_until_complete(run())


def _in_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    path = FOLDER / name

    def run(raw: bytes) -> None:
        path.write_bytes(raw)
        read(path)

    return run


def _text(read: Callable[[str], Any]) -> Callable[[bytes], Any]:
    return lambda raw: read(raw.decode("utf-8", "replace"))


def _surrogates(read: Callable[[str], Any]) -> Callable[[bytes], Any]:
    return lambda raw: read(raw.decode("utf-8", "surrogateescape"))


CONFIG = b"""[tasks]
path = "tasks.jsonl"
[policy]
model = "openai:m"
temperature = 0.7
[verifier]
kind = "exact"
[budget]
max_usd = 5.0
[learn]
steps = 3
"""
GATEWAY = b"""[serve]
folder = "runs/gateway"
[upstreams.a]
model = "openai:m"
[routes.main]
upstreams = ["a"]
aliases = ["m"]
[keys.k]
routes = ["main"]
"""
ROLLOUT = Rollout(
    "r", "t", (Step(Message("assistant", "4")),), "graded", Score(1.0, "right", {"a": 1.0})
)
GROUP = RolloutGroup("g", Task("t", "2+2?", "4", {"a": 1}), (ROLLOUT,))
TASKS = [
    {"task_id": "a", "prompt": "2+2?", "reference": "4", "metadata": {"x": 1}},
    {"id": 7, "messages": [{"role": "user", "content": "hi"}], "answer": [1, {"a": 2}]},
]
OUTCOMES = [
    {"prompt": "a", "model": "m", "reward": 0.5, "dataset": "d", "cost_usd": 0.1, "at": 3},
    {"prompt": "b", "model": "n", "successes": 1, "trials": 3, "metadata": {"k": "v"}},
    {"prompt": "b", "model": "n", "rewards": [0, 1, 1], "output_tokens": 5},
]
LLMBENCH = {"dataset_name": "d", "split": "s", "model_name": "m", "records": [
    {"index": 1, "origin_query": "q", "score": 1, "completion_tokens": 5, "cost": 0.1}]}  # fmt: skip
CHAT_BODY = {
    "model": "main", "n": 2, "stream": True, "stream_options": {"include_usage": True},
    "messages": [{"role": "system", "content": [{"type": "text", "text": "be kind"}]},
                 {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url",
                  "image_url": {"url": "data:x"}}]}, {"role": "assistant", "content": None}],
    "tfgrpo": {"task_id": "t", "samples": 2, "select": "vote", "metadata": {"a": "b"},
               "max_cost_usd": 0.5, "capture": "off"},
}  # fmt: skip
RESPONSES_BODY = {"model": "main", "instructions": "be kind", "stream": False, "input": [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
    "tfgrpo": {"group_id": "g"}}  # fmt: skip
EMBEDDING_BODY = {"model": "main", "input": ["a", "b"], "encoding_format": "float"}
INJECTION = Injection.of(artefacts.Artefact(
    artefacts.Library().apply([edits.Edit("add", "Check the units.")]).library,
    artefacts.Card(name="a"),
))  # fmt: skip


def read_request(raw: bytes) -> None:
    """The way of a request's body through the gateway, until it is sent."""
    body = parse_object(raw)
    read_extensions(body.get("tfgrpo"), {}, Place("/v1/chat/completions"))
    for dialect in (CHAT, RESPONSES, EMBEDDINGS):
        try:
            dialect.check(body)
            check_system_turns(body)
            refuse_urls(body)
        except ApiError:
            continue
        dialect.prompt(body)
        json.dumps(dialect.make(body, "m", INJECTION))


def read_upstream(raw: bytes) -> None:
    for dialect in (CHAT, RESPONSES, EMBEDDINGS):
        try:
            dialect.read(raw, "id", 10, "here")
        except TfgrpoError:
            pass  # the next format reads the same bytes


def relay(raw: bytes) -> None:
    for events in (
        ChatEvents("chatcmpl-tf", wants_usage=True, where="here", keeps=True),
        ResponseEvents("resp_tf", where="here"),
    ):
        try:
            for at in range(0, len(raw), 100):
                events.feed(raw[at : at + 100])
            events.close()
        except (TfgrpoError, ApiError):
            pass  # the next format reads the same bytes


RESPONSE_EVENTS = [
    {"type": "response.created", "response": {"id": "r", "status": "in_progress"}},
    {"type": "response.output_text.delta", "delta": "a", "output_index": 0},
    {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": [],
     "usage": {"input_tokens": 1, "output_tokens": 2}}},
]  # fmt: skip
CRITIC = [
    {"rules": [{"text": "a is written as b here.", "topic": "x", "id": "E1", "support": ["T1"],
                "against": "T2, T3", "confidence": 0.7, "open_question": "why?", "replaces": [1]}],
     "entries": [{"id": "E1", "verdict": "confirmed", "tasks": ["T1"]}]},
    [{"op": "add", "text": "Check the units."}, {"operation": "UPDATE", "id": "G0", "content": "x"},
     {"op": "merge", "ids": ["G0", "G1"], "text": "y", "from": ["C1"]}, {"delete": "G1"}],
    {"lessons": [{"lesson": "Check units.", "attempts": [1, "2"]}]},
    {"operations": [{"op": "delete", "target": 0, "reason": "old"}]},
]  # fmt: skip
LABELS = {"G0": "E1", "G1": "E5"}


def read_critic(text: str) -> None:
    for read in (
        lambda: read_reply(text, ["T1", "t2"], ["E1", "E5"]),
        lambda: edits.read_operations(text, LABELS, proposals={"C1": "C1"}),
        lambda: edits.read_operations(text, LABELS, strings_are_adds=True),
        lambda: edits.read_lessons(text),
        lambda: operations_from(text, LABELS, Repairs(lenient_operations=False, id_aliases=False)),
        lambda: read_score(text, Scale()),
    ):
        try:
            read()
        except ReplyError:
            pass  # sent back to the model


def read_hints(text: str) -> None:
    parse_levels(text)
    try:
        read_texts(text, 3)
    except ReplyError:
        pass  # sent back to the model


SPEC = ToolSpec("f", "does", {"type": "object", "properties": {"a": {"type": "integer"},
                "b": {"type": "string", "default": "x"}}, "required": ["a"]})  # fmt: skip


def read_calls(text: str) -> None:
    calls = [ToolCall("1", "f", text)]
    if (written := parse_action("Action: f " + text)) is not None:
        calls.append(written)
    match_calls([{"name": "f", "arguments": {"a": 1}}], calls, [SPEC])
    parse_action(text)


def read_refusal(raw: bytes) -> None:
    http_failure(400, {"retry-after": raw[:30].decode("latin-1")}, raw, where="x", key_source="y")
    Parameters().learn({"seed": 1, "temperature": 1, "max_tokens": 2}, raw, {})


def _signed(row: Any) -> bytes:
    """A library whose digest fits what was changed."""
    if isinstance(row, dict):
        body = {k: v for k, v in row.items() if k != "sha256"}
        try:
            row = {**row, "sha256": digest(body)}
        except (TfgrpoError, ValueError, TypeError):
            pass  # no digest of such a value
    return json_bytes(row)


def _library_row() -> Any:
    found = artefacts.Artefact(
        artefacts.Library()
        .apply([edits.Edit("add", "Check the units."), edits.Edit("add", "Sum first.")])
        .library,
        artefacts.Card(name="a", models={"policy": "m"}, scores={"empty": [0.1, 0.0, 0.2]}),
    )
    paths = artefacts.export_artefact(found, FOLDER / "artefact")
    return json.loads(paths["library.json"].read_text())


def _lines(rows: Any) -> bytes:
    return b"\n".join(json_bytes(r) for r in (rows if isinstance(rows, list) else [rows]))


def readers() -> dict[str, Reader]:
    tasks_csv = b'task_id,prompt,reference,topic\na,2+2?,4,x\nb,"3,\n3",6,y\n'
    outcomes_csv = b"prompt,model,reward,cost_usd\na,m,1,0.1\nb,n,0.5,\n"
    wide_csv = b"prompt,sample_id,eval_name,m,m|total_cost\na,1,d,1.0,0.1\n"
    error = {"error": {"message": "Unsupported parameter: 'seed'", "param": "seed",
                       "code": "unsupported_parameter", "type": "x"}}  # fmt: skip
    prices = [{"name": "m", "input_per_million": 1, "output_per_million": 2}]
    return {
        "reply": Reader(read_body, (COMPLETION,)),
        "streamed reply": Reader(read_stream, (DELTAS,), write=_stream_bytes),
        "refusal": Reader(read_refusal, (error, {"detail": [{"msg": "extra_forbidden"}]})),
        "config TOML": Reader(_in_file("c.toml", Config.from_toml), texts=(CONFIG,)),
        "gateway TOML": Reader(_in_file("g.toml", GatewaySettings.from_toml), texts=(GATEWAY,)),
        "override": Reader(_text(lambda t: apply_override({"a": {"b": 1}}, t)),
                           texts=(b"a.b=[1, 2]", b"a=2020-01-01")),
        "tasks JSONL": Reader(_in_file("t.jsonl", read_tasks), (TASKS,), write=_lines),
        "tasks JSON list": Reader(_in_file("t.json", read_tasks), (TASKS,)),
        "tasks CSV": Reader(_in_file("t.csv", read_tasks), texts=(tasks_csv,)),
        "traces": Reader(_in_file("g.jsonl", lambda p: list(read_groups(p))),
                         ([json.loads(json.dumps(GROUP.to_dict()))],), write=_lines),
        "library.json": Reader(_in_file("l.json", artefacts.load_artefact), (_library_row(),),
                               write=_signed),
        "outcomes CSV": Reader(_in_file("o.csv", read_outcomes), texts=(outcomes_csv, wide_csv)),
        "outcomes JSONL": Reader(_in_file("o.jsonl", read_outcomes), (OUTCOMES,), write=_lines),
        "outcomes JSON": Reader(_in_file("o.json", read_outcomes), (LLMBENCH, OUTCOMES)),
        "models JSON": Reader(_in_file("m.json", read_models), (prices,)),
        "gateway request": Reader(read_request, (CHAT_BODY, RESPONSES_BODY, EMBEDDING_BODY)),
        "gateway upstream": Reader(read_upstream, (COMPLETION, {"id": "r", "status": "completed",
                                   "output": [], "usage": {"input_tokens": 1}}, {"data": [
                                   {"index": 0, "embedding": [0.5]}], "usage": {}})),
        "gateway stream": Reader(relay, (DELTAS, RESPONSE_EVENTS), write=_stream_bytes),
        "critic reply": Reader(_text(read_critic), tuple(CRITIC)),
        "critic reply, bytes kept": Reader(_surrogates(read_critic), tuple(CRITIC),
                                           write=lambda t: b"Sure:\n```json\n" + json_bytes(t)),
        "hints": Reader(_text(read_hints), ({"level_1": "a", "level_2": "b", "level_3": "c"},
                        {"hints": [{"level": 1, "hint": "Add."}, "x", "y"]}),
                        (b"**Level 1:** a\n2. b\n<level_3>c</level_3>",)),
        "tool calls": Reader(_text(read_calls), ({"a": 1, "b": "x"}, {"a": [1], "c": {}})),
    }  # fmt: skip


ALLOWED = (TfgrpoError, ReplyError, ApiError)


def _kept_rows(wanted: list[str]) -> list[dict[str, Any]]:
    """Return what is recorded of the readers that are not wanted now."""
    file = RESULTS / "fuzz_readers.json"
    rows = json.loads(file.read_text())["rows"] if wanted and file.exists() else []
    return [row for row in rows if row["reader"] not in wanted]


def main() -> None:
    logging.disable()  # a reader's warnings about left-out rows
    wanted = sys.argv[1:]
    seconds = SECONDS
    if wanted and wanted[0].replace(".", "").isdigit():
        seconds = float(wanted.pop(0))
    rows: list[dict[str, Any]] = _kept_rows(wanted)
    raw = Counter[str]()
    for name, reader in readers().items():
        if wanted and name not in wanted:
            continue
        rng = random.Random(f"{SEED} {name}")
        refused, tried, known = 0, 0, raw.total()
        until = time.monotonic() + seconds
        while tried < MOST and time.monotonic() < until:
            given = reader.input(rng)
            tried += 1
            try:
                reader.read(given)
            except ALLOWED:
                refused += 1
            except Exception as exc:  # what this benchmark counts
                at = traceback.extract_tb(exc.__traceback__)[-1]
                kind = f"{name}: {type(exc).__name__} {exc!s:.80} at {at.name}:{at.lineno}"
                if not raw[kind]:
                    print(kind, given[:300], file=sys.stderr)
                    traceback.print_tb(exc.__traceback__, -4, sys.stderr)
                raw[kind] += 1
        rows.append(
            {"reader": name, "inputs": tried, "refused": refused, "raw": raw.total() - known}
        )
        print(rows[-1], file=sys.stderr, flush=True)
    record(
        "fuzz_readers",
        {
            "readers": len(rows),
            "inputs": sum(row["inputs"] for row in rows),
            "raw": sum(row.get("raw", 0) for row in rows),
            "raw_kinds": dict(raw),
            "seconds_a_reader": seconds,
            "most_a_reader": MOST,
            "seed": SEED,
            "rows": rows,
        },
        f"python -m tests.benchmarks.faults.fuzz_readers {seconds:g}",
    )


if __name__ == "__main__":
    main()
