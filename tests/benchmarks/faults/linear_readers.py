"""CPU time of every reader of foreign text while hostile texts double, up to 1 MB.

For each (reader, text) the size doubles until a reading takes `ENOUGH_S` or reaches 1 MB; a
reader's slowest text is read at 1 MB in any case. A reader
is superlinear on a text where two doublings in a row cost more than `MOST_RATIO` times as much, or
one did and the reading then took over `HOPELESS_S`, or where 1 MB costs that many times what the
smaller size foretold.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tfgrpo.errors import TfgrpoError
from tfgrpo.experience import edits, guards, similarity
from tfgrpo.experience.critic.evidence import fence
from tfgrpo.experience.critic.paper_flow import _lessons_in
from tfgrpo.experience.critic.paper_operations import operations_from
from tfgrpo.experience.reflect.reply import read_reply
from tfgrpo.experience.replies import visible
from tfgrpo.experience.settings import Repairs
from tfgrpo.hints import answer_leaks, writer
from tfgrpo.hints.metadata import steps_of
from tfgrpo.lm.failures import error_in_body, excerpt, failure_kind, http_failure
from tfgrpo.lm.local.chat_template import ChatFormat
from tfgrpo.lm.openai_reply import ReplyReader, _json_texts
from tfgrpo.lm.parameters import Parameters
from tfgrpo.lm.stream import EventStream
from tfgrpo.lm.wire import ChoiceParts, finish_word, loads
from tfgrpo.messages import Message
from tfgrpo.policies.tool_calls import parse_action, parse_arguments
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Task
from tfgrpo.routing import outcome_files
from tfgrpo.runtime import json_text, lenient_json, redaction, terminal, thinking
from tfgrpo.runtime.texts.text_lines import numbered_lines
from tfgrpo.runtime.texts.tool_names import wire_name
from tfgrpo.search.proposers import lm as search_lm
from tfgrpo.serve import identity, selection
from tfgrpo.serve.endpoints.dialects import CHAT, refuse_urls
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.serve.wire.events import ChatEvents, ResponseEvents
from tfgrpo.serve.wire.http import check_depth, parse_object
from tfgrpo.tasks import contamination, splits
from tfgrpo.tasks.files import read_tasks
from tfgrpo.verifiers import answer, judge, numbers
from tfgrpo.verifiers import math as math_verifier
from tfgrpo.verifiers.code import code_in
from tfgrpo.verifiers.json_schema import JsonSchema
from tfgrpo.verifiers.numeric import Numeric

SIZES = [1 << k for k in range(11, 21)]
ENOUGH_S = 0.006
HOPELESS_S = 0.05
LEAST_S = 0.002
MOST_RATIO = 3.0

FOLDER = Path(tempfile.mkdtemp())
REQUEST = Request((Message("user", "x"),))
KEY = "CANARY-0123456789abcdef"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


async def _chunks(raw: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(raw), size):
        yield raw[at : at + size]


async def _streamed(text: str, size: int) -> None:
    raw = b"".join(b"data: " + _bytes(p) + b"\n\n" for p in text.split("\n"))
    async with asyncio.timeout(None) as first:
        await ReplyReader(REQUEST, "here").read_stream(_chunks(raw, size), first)


def _as_delta(text: str) -> str:
    """One text in pieces of 16 characters, each a delta."""
    pieces = [text[i : i + 16] for i in range(0, len(text), 16)]
    rows = [{"choices": [{"index": 0, "delta": {"content": p}}]} for p in pieces]
    rows.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return "\n".join(json.dumps(r) for r in rows)


async def _body(text: str) -> None:
    row = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
    reader = ReplyReader(REQUEST, "here")
    await reader.read_body(_chunks(_bytes(json.dumps(row)), 4096))


def _whole(text: str) -> None:
    parts = ChoiceParts()
    parts.add({}, {"content": text})
    parts.completion(usage=Completion("").usage, model="m")


def _events(text: str) -> None:
    stream = EventStream()
    raw = _bytes(text)
    for at in range(0, len(raw), 7):
        stream.feed(raw[at : at + 7])
    stream.close()


def _gateway(kind: Callable[..., Any], **options: Any) -> Callable[[str], None]:
    def run(text: str) -> None:
        events = kind("chatcmpl-tf", where="here", **options)
        raw = b"data: " + _bytes(text) + b"\n\n"
        for at in range(0, len(raw), 512):
            events.feed(raw[at : at + 512])
        events.close()

    return run


def _file(name: str, read: Callable[[Path], Any]) -> Callable[[str], None]:
    def run(text: str) -> None:
        path = FOLDER / name
        path.write_bytes(_bytes(text))
        read(path)

    return run


def _in_row(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: read(json.dumps({"rules": [{"text": text, "id": text, "support": text}]}))


LABELS = {"G0": "E1", "G1": "E5"}
PUBLISHED = Repairs(lenient_operations=False, grounded_merge=False)
TASK = Task("t", "what?", "12", {"solution": "x"})
GUARDS = guards.Guards.of([TASK])
SCHEMA = JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}},
                     "additionalProperties": False})  # fmt: skip


def _schema_score(text: str) -> None:
    value = answer.find_json(text, lambda v: SCHEMA._fit(v, {"a": 1}))
    from tfgrpo.runtime.json_schema import field_errors
    from tfgrpo.verifiers.json_schema import _wrong_fields

    _wrong_fields(value, field_errors(SCHEMA._schema or {}, value), {"a": 1})


NUMERIC = Numeric()

READERS: dict[str, Callable[[str], Any]] = {
    "lm.wire.loads": lambda t: loads(_bytes(t)),
    "lm.wire.ChoiceParts": _whole,
    "lm.stream.EventStream": _events,
    "lm.openai_reply.read_body": lambda t: asyncio.run(_body(t)),
    "lm.openai_reply.read_stream": lambda t: asyncio.run(_streamed(t, 1024)),
    "lm.openai_reply.read_stream deltas": lambda t: asyncio.run(_streamed(_as_delta(t), 1024)),
    "lm.parameters.learn": lambda t: Parameters().learn(
        {"seed": 1, "temperature": 1, "max_tokens": 2}, _bytes(t), {}
    ),
    "lm.failures.excerpt": excerpt,
    "lm.failures.failure_kind": lambda t: failure_kind(400, t[:4000]),
    "lm.failures.error_in_body": lambda t: error_in_body({"message": t}),
    "lm.openai_reply.json_texts": _json_texts,
    "lm.wire.finish_word": finish_word,
    "lm.failures.http_failure": lambda t: http_failure(
        400, {"retry-after": t}, t, where="here", key_source="none"
    ),
    "runtime.json_text.json_in": json_text.json_in,
    "runtime.json_text.fenced_blocks": json_text.fenced_blocks,
    "runtime.lenient_json.json_values": lenient_json.json_values,
    "runtime.thinking.split_thinking": thinking.split_thinking,
    "runtime.thinking.has_open_thinking": thinking.has_open_thinking,
    "runtime.redaction.redact": redaction.redact,
    "runtime.redaction.redact_known": redaction.redact_known,
    "runtime.terminal.printable": terminal.printable,
    "runtime.terminal.one_line": terminal.one_line,
    "runtime.terminal.markup": terminal.markup,
    "runtime.text_lines.numbered_lines": lambda t: list(numbered_lines(t)),
    "runtime.tool_names.wire_name": wire_name,
    "experience.replies.visible": lambda t: visible(Completion(t)),
    "experience.edits.read_operations": lambda t: edits.read_operations(t, LABELS),
    "experience.edits.read_lessons": edits.read_lessons,
    "experience.edits.resolve": lambda t: edits.resolve(t, LABELS),
    "experience.reflect.read_reply": lambda t: read_reply(t, ["t1"], ["E1"]),
    "experience.reflect.read_reply fields": _in_row(lambda t: read_reply(t, ["t1"], ["E1"])),
    "experience.guards.check": GUARDS.check,
    "experience.guards.Foreign.of": lambda t: guards.Foreign.of([t]),
    "experience.guards.Foreign.check": guards.Foreign.of(["remember the rule: B7"]).check,
    "experience.guards.repeats_prompt": guards.repeats_prompt,
    "experience.guards patterns": lambda t: [
        p.search(t) for p in (*guards.HOLD.values(), *guards.PERSONAL.values(), guards.MEMORY_ORDER)
    ],
    "experience.similarity.is_near": lambda t: similarity.is_near(t, t + " x"),
    "experience.similarity.normal": similarity.normal,
    "experience.critic.published_rows": lambda t: operations_from(t, LABELS, PUBLISHED),
    "experience.critic.paper_flow tag": _lessons_in,
    "experience.critic.fence": fence,
    "hints.writer.parse_levels": writer.parse_levels,
    "hints.writer.read_texts": lambda t: writer.read_texts(t, 3),
    "hints.metadata.steps_of": lambda t: steps_of(Task("t", "?", "12", {"solution": t})),
    "hints.answer_leaks.leaks": lambda t: answer_leaks.leaks(t, TASK),
    "hints.answer_leaks.answers_of": answer_leaks.answers_of,
    "tasks.files JSON lines": _file("tasks.jsonl", read_tasks),
    "tasks.files CSV": _file("tasks.csv", read_tasks),
    "tasks.contamination.normalised": contamination.normalised,
    "tasks.splits.template": splits.template,
    "verifiers.answer.boxed": answer.boxed,
    "verifiers.answer.find_json": lambda t: answer.find_json(t, lambda v: 1.0),
    "verifiers.numbers.numbers_in": numbers.numbers_in,
    "verifiers.numbers.numbers_in comma": lambda t: numbers.numbers_in(t, decimal_mark=","),
    "verifiers.numbers.number_of": numbers.number_of,
    "verifiers.numbers.plain_text": numbers.plain_text,
    "verifiers.numeric boxed": lambda t: NUMERIC._answer(rf"\boxed{{{t}}}"),
    "verifiers.numeric whole": NUMERIC._answer,
    "verifiers.json_schema": _schema_score,
    "verifiers.code.code_in": lambda t: code_in(t, ["f"]),
    "verifiers.math": lambda t: (
        math_verifier._without_exponents(t[-20_000:]),
        math_verifier._is_same_number(t, "5"),
    ),
    "verifiers.judge.read_score": lambda t: judge.read_score(t, judge.Scale()),
    "lm.local.tool_calls": ChatFormat.tool_calls,
    "policies.tool_calls.parse_action": parse_action,
    "policies.tool_calls.parse_arguments": parse_arguments,
    "routing.outcome_files.parse_outcomes": lambda t: outcome_files.parse_outcomes(t, "here"),
    "routing.outcome_files CSV": _file("outcomes.csv", outcome_files.read_outcomes),
    "search.proposers score": lambda t: search_lm._SCORE.findall(t),
    "serve.http.check_depth": lambda t: check_depth(_bytes(t)),
    "serve.http.parse_object": lambda t: parse_object(_bytes(t)),
    "serve.dialects.check": lambda t: (
        CHAT.check({"messages": [{"role": "user", "content": t}]}),
        refuse_urls({"messages": [{"role": "user", "content": [{"type": "file", "file": t}]}]}),
    ),
    "serve.dialects.read": lambda t: CHAT.read(_bytes(t), "id", 1, "here"),
    "serve.events.ChatEvents": _gateway(ChatEvents, wants_usage=True, keeps=True),
    "serve.events.ResponseEvents": _gateway(ResponseEvents),
    "serve.identity.read_place": lambda t: identity.read_place("/r/" + t),
    "serve.identity.read_extensions": lambda t: identity.read_extensions(
        None, {"x-tfgrpo-task-id": t}, identity.Place("/v1")
    ),
    "serve.selection.number": selection.extractor("number"),
    "serve.selection.last_line": selection.extractor("last_line"),
    "serve.selection.read_best": lambda t: selection.read_best(t, 3),
}


def _calls(size: int) -> str:
    """One reply whose stream begins a new call with every piece."""
    rows = [
        {"choices": [{"index": 0, "delta": {"tool_calls": [
            {"index": i, "id": f"c{i}", "function": {"name": "f", "arguments": "{}"}}]}}]}
        for i in range(size // 128)
    ]  # fmt: skip
    return "\n".join(json.dumps(r) for r in rows)


def _one_call(size: int) -> str:
    """One call in many pieces, each with the call's name again."""
    rows = [
        {"choices": [{"index": 0, "delta": {"tool_calls": [
            {"index": 0, "function": {"name": "f", "arguments": "[1,"}}]}}]}
        for _ in range(size // 110)
    ]  # fmt: skip
    return "\n".join(json.dumps(r) for r in rows)


def _fields(size: int) -> str:
    return json.dumps({f"k{i}": i for i in range(size // 12)})


def _rules(size: int) -> str:
    return json.dumps({"rules": [{"text": f"a rule of words {i}", "id": "E1"} for i in
                                 range(size // 45)]})  # fmt: skip


def _operations(size: int) -> str:
    return json.dumps([{"op": "add", "text": f"word {i}"} for i in range(size // 32)])


def _prompts(size: int) -> str:
    return "\n".join(json.dumps({"prompt": str(i), "model": "m", "reward": 1})
                     for i in range(size // 48))  # fmt: skip


def _of(piece: str, before: str = "", after: str = "") -> Callable[[int], str]:
    return lambda size: before + piece * (size // len(piece)) + after


TEXTS: dict[str, Callable[[int], str]] = {
    "letters": _of("a"), "digits": _of("7"), "zeros, then x": _of("0", after="x"),
    "spaces": _of(" ", "a", "b"), "newlines": _of("\n", "a", "b"), "tabs": _of("\t", "1", "x"),
    "opening brackets": _of("["), "opening braces": _of("{"), "closing brackets": _of("]"),
    "objects opened": _of('{"a":'), "arrays opened": _of("[1,"), "quotes": _of('"'),
    "single quotes": _of("'"), "opened strings": _of("['a "), "backslashes": _of("\\"),
    "escaped quotes": _of('\\"', "[" * 70 + '"'), "commas": _of(","), "semicolons": _of("; "),
    "digits and commas": _of("1,"), "digits and spaces": _of("1 "), "digit groups": _of("123 "),
    "digit groups by comma": _of(",123", "1"), "dots": _of("."), "dashes": _of("-"),
    "points and digits": _of("1."), "slashes": _of("1/"), "sums": _of("1+"), "stars": _of("*"),
    "products": _of("9*"), "powers": _of("2^"), "carets": _of("^"), "hex": _of("f", "0x"),
    "underscores": _of("_a "), "boxes opened": _of("\\boxed{"), "fractions opened": _of("\\frac{"),
    "roots": _of("\\sqrt"), "text opened": _of("\\text{"), "power, then spaces": _of(" ", "\\^"),
    "times, then spaces": _of(" ", "1\\times"), "fraction, then spaces": _of(" ", "\\frac"),
    "fences": _of("```\n"), "fence, then spaces": _of(" ", "```json"), "long fence": _of("`"),
    "fence, then newlines": _of("\n", "```"), "inline fences": _of("```a"), "tildes": _of("~~~\n"),
    "thinking opened": _of("<think>"), "thinking closed": _of("</think>"),
    "thinking of soft words": _of("<analysis></analysis>"), "thinking empty": _of("<think/>"),
    "code lines": _of("x = 1\nSo.\n"), "prompts of a session": _of(">>> x = 1\n1\n"),
    "calls in marks": _of('<tool_call>{"a":'), "calls unclosed": _of("<tool_call>{", after="}"),
    "calls as lines": _of("f(", after=")x"), "definitions": _of("def f(x):\n    return x\n"),
    "thinking nested": _of("<think>`</reasoning>"), "tags": _of("<a"), "less-than": _of("<"),
    "tag, then spaces": _of(" ", "<"), "tag with spaces": _of("< / "), "brackets of links":
    _of("[a]("), "citations": _of("[1] "), "channels": _of("<|channel|>"), "pairs": _of("[[a "),
    "experiences": _of("<Experiences>"), "e-mail": _of("a@"), "mail dots": _of("a.", after="@"),
    "addresses": _of("://a:"), "keys": _of("sk-"), "bearer": _of("bearer "), "jwt": _of("eyJa."),
    "secret pieces": _of(KEY[:10]), "halves of a secret": _of(KEY[:12] + "x"),
    "actions": _of("Action: "), "action, then spaces": _of(" \n", "Action: f"),
    "action input": _of("Action Input: (", "Action: f\n"), "scores": _of("Score: "),
    "score, then spaces": _of(" ", "Score: 5"), "score words": _of("score is "),
    "out of": _of("5 out of "), "levels": _of("level 1 "), "numbered lines": _of("1. a\n"),
    "hash lines": _of("#\n"), "labels": _of("id_", after="!"), "sentences": _of("remember all. "),
    "ignore": _of("ignore all "), "shell": _of("| && $( rm -"), "colons": _of("system :"),
    "ten parts": _of("10^{"), "data lines": _of("data: x\n"), "line ends": _of("\r\n"),
    "carriage returns": _of("\r"), "zero width": _of("\u200b"), "combining": _of("\u0301", "a"),
    "ligature": _of("\ufdfa"), "fullwidth": _of("７"), "superscripts": _of("²"), "pi": _of("π"),
    "vulgar": _of("½"), "CJK": _of("数"), "percent codes": _of("%3D", "api_key"),
    "key value": _of("api_key="), "csv header": _of(",a", "prompt,model,reward", "\n1,2,3\n"),
    "csv names": lambda size: "prompt," + ",".join(f"a{i}" for i in range(size // 6)) + "\n",
    "csv quotes": _of('""', 'prompt\n"'), "calls": _calls, "one call": _one_call,
    "fields": _fields, "rules": _rules, "operations": _operations, "prompts": _prompts,
    "blank lines": _of(" \n"), "item, then newlines": _of("\n", "1. a", "b"),
    "quotes escaped wrongly": _of('"\\'), "jwt heads": _of("eyJ-"), "long jwt": _of("eyJaaaaaaaa."),
    "password": _of("password"), "api_key": _of("api_key "), "open display": _of("\\["),
    "data objects": _of("data: {\n"), "Google keys": _of("AIza"), "use": _of("use "),
    "quota": _of("quota "), "model": _of("model "), "maximum": _of("exceeds the max "),
    "line separators": _of("\u2028"), "escapes": _of("\x1b"), "basic": _of("Basic "),
    "equals": _of("="), "encoded equals": _of("%3D"), "marks of addresses": _of("://"),
    "wrong fields": lambda size: json.dumps({f"a.b{i}'": [] for i in range(size // 14)}),
    "list of turns": _of('{"role":"user"},', '{"messages":[', "{}]}"),
}  # fmt: skip


def seconds(read: Callable[[str], Any], text: str) -> float:
    start = time.process_time()
    with suppress(TfgrpoError, ApiError, ValueError):  # a refusal's time counts as well
        read(text)
    return time.process_time() - start


@cache
def text_of(what: str, size: int) -> str:
    return TEXTS[what](size)


def measured(read: Callable[[str], Any], what: str) -> list[tuple[int, float]]:
    """Return (size, CPU seconds), the smaller of two where they would count."""
    rows: list[tuple[int, float]] = []
    for size in SIZES:
        text = text_of(what, size)
        took = seconds(read, text)
        if rows and took >= LEAST_S and took > MOST_RATIO * rows[-1][1] and took < HOPELESS_S:
            took = min(took, seconds(read, text), seconds(read, text))
        rows.append((size, took))
        if took > HOPELESS_S or (took > ENOUGH_S and len(rows) >= 3):
            break
    return rows


def is_superlinear(rows: list[tuple[int, float]]) -> bool:
    """Whether costs more than doubled again and again."""
    times = [t for _, t in rows]
    steep = [b > MOST_RATIO * a and b >= LEAST_S for a, b in pairwise(times)]
    if any(a and b for a, b in pairwise(steep)):
        return True
    return bool(steep) and steep[-1] and times[-1] > HOPELESS_S


def is_confirmed(read: Callable[[str], Any], what: str, size: int) -> bool:
    """Whether another doubling, or the last where there is none, is as steep: no cache's or
    neighbour's doing."""
    size = min(size, SIZES[-1] // 2)
    first, second = (
        min(seconds(read, text_of(what, s)) for _ in range(2)) for s in (size, 2 * size)
    )
    return second > MOST_RATIO * first


def at_one_megabyte(read: Callable[[str], Any], what: str) -> float | None:
    """Milliseconds for the slowest text at full size; None where that text is superlinear."""
    return round(seconds(read, text_of(what, SIZES[-1])) * 1e3, 1) if what else None


def main() -> None:
    redaction.register(KEY)
    started = time.process_time()
    wanted = sys.argv[1:]
    rows, found, tried = [], [], 0
    for name, read in READERS.items():
        if wanted and not any(w in name for w in wanted):
            continue
        seconds(read, "a 1 [1] {}")  # what is loaded and made once
        slowest, slow = (0.0, "", 0), len(found)
        for what in TEXTS:
            times = measured(read, what)
            size, took = times[-1]
            slowest = max(slowest, (took * 1e9 / size, what, size))
            tried += 1
            if is_superlinear(times) and is_confirmed(read, what, size):
                found.append({"reader": name, "text": what,
                              "ms": [[s, round(t * 1e3, 2)] for s, t in times[-4:]]})  # fmt: skip
                print(name, what, found[-1]["ms"], file=sys.stderr, flush=True)
        slow = len(found) - slow
        whole = None if slow else at_one_megabyte(read, slowest[1])
        if whole is not None and whole > MOST_RATIO * slowest[0] * SIZES[-1] / 1e6:
            found.append({"reader": name, "text": slowest[1], "ms": [[SIZES[-1], whole]]})
            print(name, slowest, whole, file=sys.stderr, flush=True)
        rows.append({"reader": name, "slowest_text": slowest[1],
                     "ns_per_character": round(slowest[0]), "at": slowest[2],
                     "ms_at_1_mb": whole})  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    if wanted:
        return
    record(
        "linear_readers",
        {
            "functions": len(rows),
            "texts": len(TEXTS),
            "pairs": tried,
            "superlinear": len({f["reader"] for f in found}),
            "found": found,
            "cpu_s": round(time.process_time() - started),
            "rows": rows,
        },
        "python -m tests.benchmarks.faults.linear_readers",
    )


if __name__ == "__main__":
    main()
