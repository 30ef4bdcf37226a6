"""Kinds of faults met in the field: some inputs of each that no test holds, and what is right.

A kind is one cause with many members. The tests named beside it hold its reported case and further
members; the inputs here were written afterwards, by hand, and are in no test. An input is right
where what comes out equals what a careful reader would say; a failure that says so counts as
`failed`.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.faults import journal_damage
from tests.benchmarks.record import record
from tests.lm.test_faults_streams import chunk, complete, piece
from tests.policies.test_tool_loop import calls, run
from tests.store.test_caps import PRICES as SERVER_PRICES
from tests.store.test_caps import Server, check, retried
from tests.verifiers.rows import said, task
from tfgrpo.errors import ProviderError, TfgrpoError
from tfgrpo.experience.edits import read_lessons
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.lm.usage import normalise_usage
from tfgrpo.policies.tools import check_arguments, tool
from tfgrpo.protocols import Sampling
from tfgrpo.rollout import Task
from tfgrpo.routing.outcome_files import read_outcomes
from tfgrpo.runtime.texts.tool_names import wire_names
from tfgrpo.runtime.thinking import split_thinking
from tfgrpo.search import SearchSettings, search_tree
from tfgrpo.search.proposers.lm import JudgeScorer, LMExpander
from tfgrpo.store import Journal, JournaledLM
from tfgrpo.store.budget import Budget, Ledger
from tfgrpo.tasks.files import read_tasks
from tfgrpo.testing import events, raw, say
from tfgrpo.verifiers import Code, JsonSchema, Judge, Math, Numeric, Regex

FAILED = "failed"


class Kind(NamedTuple):
    """A kind of fault."""

    name: str
    tests: str
    """Where its known members are tested."""
    see: Callable[..., Any]
    """What comes of an input."""
    cases: list[tuple[Any, ...]]
    """Inputs, each with what is right at the end."""


def graded(verifier: Any, answer: str, reference: Any) -> Any:
    """Return the reward of an answer."""
    return asyncio.run(verifier.score(said(answer), task(reference))).reward


def answer_of(text: str) -> str:
    """Return a reply without its thinking."""
    return split_thinking(text)[0].strip()


def judged(reply: str) -> float:
    """Return what a judge's reply is worth, or fail."""
    return asyncio.run(
        Judge(ScriptedLM([reply, "no"]), "Good?").score(said("x"), task(None))
    ).reward


def ending(word: Any) -> str:
    """Return how a reply with a finish word ends."""
    return complete(say("The answer is 4", finish=word))[0].finish


def beside(fields: dict[str, Any]) -> str:
    """Return the text of a reply with further fields beside its choices."""
    whole = [{"index": 0, "message": {"content": "4"}, "finish_reason": "stop"}]
    return complete(raw(json.dumps({"choices": whole, **fields}).encode()), stream=False)[0].text


def streamed(*pieces: Any) -> list[tuple[str, str]]:
    """Return the calls of a stream."""
    done = complete(events([*pieces, chunk({}, "tool_calls")]))[0]
    return [(c.name, c.arguments) for c in done.tool_calls]


def shown(result: Any) -> str:
    """Return what a model is told of a tool's result."""

    def look() -> Any:
        return result

    done, _ = asyncio.run(run([calls(("look", "{}")), "done"], [tool(look)]))
    return done.steps[0].observations[0].content


def called(name: str) -> str:
    """Return what comes of calling a tool whose argument has a name."""
    space: dict[str, Any] = {}
    exec(f"def look({name}: str) -> str:\n    return {name} + '!'", space)
    asked = calls(("look", json.dumps({name: "a"})))
    done, _ = asyncio.run(run([asked, "done"], [tool(space["look"])]))
    return done.steps[0].observations[0].content


def sent_names(*names: str) -> bool:
    """Tell whether each name has a form of its own that servers take."""
    forms = set(wire_names(names).values())
    return len(forms) == len(names) and all(
        f.isascii() and f.replace("_", "a").replace("-", "a").isalnum() and len(f) <= 64
        for f in forms
    )


def coded(answer: str, reference: Any) -> float:
    """Return the reward of an answer with code in it."""
    verifier = Code(level="process", i_understand=True, timeout_s=20.0)
    return asyncio.run(verifier.score(said(answer), task(reference))).reward


def program(source: str) -> float:
    """Return the reward of a program that adds two numbers."""
    return coded(f"```python\n{source}\n```", {"runs": [{"stdin": "2 3\n", "stdout": "5\n"}]})


def in_file(name: str, content: bytes, read: Callable[[Path], Any]) -> Any:
    """Return what is read of a file."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / name
        path.write_bytes(content)
        return read(path)


def models_of(content: bytes) -> list[str]:
    """Return the models in a table of outcomes."""
    return sorted({o.model for o in in_file("o.csv", content, read_outcomes)})


def prompts_of(content: bytes, name: str = "t.jsonl") -> list[str]:
    """Return the prompts in a task file."""
    return [str(t.prompt) for t in in_file(name, content, read_tasks)]


def lessons_of(text: str) -> list[str]:
    """Return the lessons of a critic's reply."""
    return [lesson.text for lesson in read_lessons(text)]


def tokens_of(report: Any) -> tuple[int, int, bool]:
    """Return the tokens of a usage report, and whether they are estimated."""
    usage = normalise_usage(report)
    return usage.prompt_tokens, usage.completion_tokens, usage.is_estimated


def capped(seed: int) -> str:
    """Search under a cap on calls with a judge and failures; return what was passed."""
    server, rng = Server(seed), random.Random(seed)
    ledger = Ledger(Budget(calls=rng.randint(10, 90), expansions=12))

    async def search(folder: str) -> None:
        with Journal.open(Path(folder) / "run", create=True) as store:
            lm = retried(JournaledLM(server.lm(), store, prices=SERVER_PRICES))
            expander = LMExpander(lm, sampling=Sampling(temperature=1.0, max_tokens=20))
            settings = SearchSettings(samples=3, concurrency=4, lookahead=3, seed=seed)
            await search_tree(
                Task("t", "solve it"), expander, scorer=JudgeScorer(lm), settings=settings,
                budget=ledger,
            )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(search(folder))
    try:
        check(ledger, server.sold)
    except AssertionError as exc:
        return str(exc).partition("\n")[0]
    return ""


def damaged(number: int) -> str:
    """Flip a bit of a journal, or cut it; return what went wrong."""
    bench = journal_damage.Bench()
    if not STATES:
        ROOTS.append(tempfile.TemporaryDirectory())
        STATES.extend(journal_damage.states(Path(ROOTS[0].name)))
    rng = random.Random(f"field {number}")
    harm = journal_damage.cut if number % 4 == 3 else journal_damage.flip
    bench.case("flips", STATES[number % len(STATES)], harm, rng)
    bad = ("silent", "wrong", "raw", "locked", "refused")
    return ", ".join(name for name in bad if bench.counts[name])


STATES: list[journal_damage.State] = []
ROOTS: list[tempfile.TemporaryDirectory[str]] = []
ADDING = {"function": "add3", "cases": [{"args": [4], "expected": 7}]}
REFERRED = {
    "$defs": {"a": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    "type": "object",
    "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {"type": "string"}}}],
}
EITHER = {"anyOf": [{"required": ["path"]}, {"required": ["url"]}], "properties": {
    "path": {"type": "string"}, "url": {"type": "string"}}}  # fmt: skip
COMMA = Numeric(decimal_comma=True)
MONEY = Numeric()

KINDS = [
    Kind("grouping of digits", "tests/verifiers/test_numbers.py", graded, [
        (MONEY, "In all 4 096 units.", 4096, 1.0),
        (COMMA, "Das macht 12 345 678,9 Euro.", 12345678.9, 1.0),
        (MONEY, r"\boxed{2\,048}", 2048, 1.0),
        (MONEY, "It holds 7'300'000 items.", 7300000, 1.0),
        (MONEY, "The pair is 15 and 200.", 15200, 0.0),
        (MONEY, r"\boxed{1{,}024}", 24, 0.0),
    ]),
    Kind("numbers in LaTeX", "tests/verifiers/test_numbers.py", graded, [
        (MONEY, r"\boxed{\dfrac{7}{8}}", 0.875, 1.0),
        (MONEY, r"so $x = \boxed{-2\tfrac{1}{4}}$", -2.25, 1.0),
        (MONEY, r"\boxed{\frac{22}{7}}", 22, 0.0),
        (MONEY, r"\boxed{\frac{22}{7}}", 7, 0.0),
        (MONEY, r"\boxed{\sqrt{16}}", 16, 0.0),
        (MONEY, "roughly 2½", 2.5, 1.0),
    ]),
    Kind("e-notation", "tests/verifiers/test_math.py", graded, [
        (Math(), r"\boxed{0.0025}", "2.5e-3", 1.0),
        (Math(), r"\boxed{1.2e3}", "1200", 1.0),
        (Math(), r"\boxed{2.5 \times 10^{-3}}", "2.5E-3", 1.0),
        (Math(), r"\boxed{3e}", "3", 0.0),
    ]),
    Kind("JSON in prose", "tests/runtime/test_json_text.py", graded, [
        (JsonSchema(), 'As [Smith] wrote (see {fig 2}): {"ok": true}.', {"ok": True}, 1.0),
        (JsonSchema(), "Result [3, 1, 2] (three items), sorted [1, 2, 3]", [1, 2, 3], 1.0),
        (JsonSchema(), "none was found: []", [], 1.0),
        (JsonSchema(), 'Use `{}` for none. Answer: {"a": {"b": [1]}}', {"a": {"b": [1]}}, 1.0),
        (JsonSchema(), "```json\n[\"x\"]\n```\nThat is all [1].", ["x"], 1.0),
        (JsonSchema(), '{"a": [1, 2]}', [1, 2], 0.0),
    ]),
    Kind("judge's reply", "tests/verifiers/test_judge.py", judged, [
        ("**Rating**: 7/10", 0.7),
        ("I'd give this a 90 out of 100.", 0.9),
        ("Final score: 4 / 5", 0.8),
        ("[[ 70 ]]", 0.7),
        ("Steps 1 and 3 hold, 2 does not.\nOverall rating: 60 / 100", 0.6),
        ("Between 20 and 90, hard to say", FAILED),
    ]),
    Kind("thinking marks", "tests/runtime/test_thinking.py", answer_of, [
        ("[think]a[/think]B", "B"),
        ("so far 41</think>42", "42"),
        ("<think>a</think><think>b</think>c", "c"),
        ("<Think>\nx\n</Think>\n\n7", "7"),
        ("Write `<think>` in the prompt.", "Write `<think>` in the prompt."),
        ("<thinking>one</thinking>\nA\n<thinking>two</thinking>", "A"),
    ]),
    Kind("finish words", "tests/lm/test_faults_streams.py", ending, [
        ("aborted", FAILED), ("MAX_TOKENS", "length"), ("end_turn", "stop"),
        ("SAFETY", "content_filter"), ("preempted", FAILED), ("EOS_TOKEN", "stop"),
    ]),
    Kind("errors beside choices", "tests/lm/test_error_fields.py", beside, [
        ({"error": {"message": "boom", "code": 503}}, FAILED),
        ({"errors": [{"message": "boom"}]}, FAILED),
        ({"status": "failed", "detail": "worker died"}, FAILED),
        ({"error": None, "warnings": []}, "4"),
        ({"message": "Thank you for using us.", "code": 0}, "4"),
    ]),
    Kind("calls in a stream", "tests/lm/test_faults_streams.py", streamed, [
        (piece(0, "f", '{"a": 1}', "p"), piece(0, "f", '{"a": 2}', "q"),
         [("f", '{"a": 1}'), ("f", '{"a": 2}')]),
        (piece(3, "f", '{"a"', "p"), piece(3, "", ": 1}"), piece(9, "g", "{}", "q"),
         [("f", '{"a": 1}'), ("g", "{}")]),
        (piece(1, "g", "{}", "q"), piece(0, "f", "{}", "p"), [("f", "{}"), ("g", "{}")]),
    ]),
    Kind("tool schemas", "tests/policies/test_tool_kinds.py",
         lambda schema, args: not check_arguments(schema, args), [
        (REFERRED, {"x": 1, "y": "a"}, True), (REFERRED, {"y": "a"}, False),
        (REFERRED, {"x": 1, "z": 2}, False), (EITHER, {"url": "u"}, True),
        (EITHER, {}, False), ({"type": "object"}, {"anything": [1]}, True),
        ({"patternProperties": {"^x-": {"type": "integer"}}}, {"x-a": 1}, True),
    ]),
    Kind("names of arguments", "tests/policies/test_tool_kinds.py", called,
         [(n, "a!") for n in ("fn", "kwargs", "state", "name", "request", "timeout", "loop")]),
    Kind("results of tools", "tests/policies/test_tool_kinds.py", shown, [
        ({"on": datetime.date(2027, 2, 3)}, '{"on":"2027-02-03"}'),
        (datetime.timedelta(seconds=90), '"0:01:30"'), ({"a": (1, 2)}, '{"a":[1,2]}'),
        ("", "(no output)"), ([Path("a/b")], '["a/b"]'),
    ]),
    Kind("names of tools", "tests/policies/test_tool_kinds.py", sent_names, [
        ("röntgen.start", "rontgen_start", True), ("a b", "a.b", "a_b", True),
        ("x" * 65, "x" * 66, True), ("搜索", "搜尋", True),
    ]),
    Kind("which code block", "tests/verifiers/test_code.py", coded, [
        ("```text\nplan\n```\n```py\ndef add3(x):\n    return x + 3\n```\n```sh\npython a.py\n```",
         ADDING, 1.0),
        ("```python\ndef add3(x): return x + 3\n```\nfor instance\n```\n>>> add3(1)\n4\n```",
         ADDING, 1.0),
        ("First try:\n```python\ndef add3(x): return 3\n```\nBetter:\n"
         "```python\ndef add3(x): return x + 3\n```", ADDING, 1.0),
        ("~~~python\nadd3 = lambda x: x + 3\n~~~", ADDING, 1.0),
    ]),
    Kind("code as a program", "tests/verifiers/test_code.py", program, [
        ("print(sum(map(int, open(0).read().split())))", 1.0),
        ("import fileinput\nprint(sum(int(w) for l in fileinput.input() for w in l.split()))", 1.0),
        ("import sys\nprint(sum(map(int, next(iter(sys.stdin)).split())))\nsys.exit(0)", 1.0),
        ("a, b = map(int, input().split())\nprint(a + b)\nquit()", 1.0),
        ("import os\nos.write(1, b'5\\n')", 1.0),
        ("print(5)\nraise SystemExit(3)", 0.0),
    ]),
    Kind("long integers", "tests/verifiers/test_long_integers.py", coded, [
        ("```python\ndef add3(x):\n    return x + 3\n```",
         {"function": "add3", "cases": [{"args": [10**6000], "expected": 10**6000 + 3}]}, 1.0),
        ("```python\ndef add3(x):\n    return x + 3\n```",
         {"function": "add3", "tests": "assert add3(7 ** 9000) == 7 ** 9000 + 3"}, 1.0),
    ]),
    Kind("byte-order marks", "tests/routing", models_of, [
        ("\ufeffmodel,prompt,reward\nm,a,1\nn,a,0\n".encode(), ["m", "n"]),
        ("\ufeff\"prompt\",\"model\",\"reward\"\r\na,m,1\r\n".encode(), ["m"]),
        ("prompt,model,reward\na,m,1\n".encode("utf-16-le"), FAILED),
    ]),
    Kind("lines of text", "tests/runtime/test_foreign_texts.py", prompts_of, [
        ('{"task_id": "a", "prompt": "x\u2028y"}\n'.encode(), ["x\u2028y"]),
        ('{"task_id": "a", "prompt": "x\x85y"}\r\n'.encode(), ["x\x85y"]),
        ('\ufeff{"task_id": "a", "prompt": "x"}\n\n'.encode(), ["x"]),
        (b'{"task_id": "a", "prompt": "x"}\n{"task_id": "b", "pro', FAILED),
    ]),
    Kind("brackets in prose", "tests/experience", lessons_of, [
        ('See [the docs](http://x) and [1]. ["Check units first."]', ["Check units first."]),
        ('[Note] Two of them:\n["Read twice.", "Sum last."] [end]', ["Read twice.", "Sum last."]),
        ("Nothing to learn here [2]: []", []),
    ]),
    Kind("absurd numbers", "tests/store/test_hostile.py", tokens_of, [
        ({"prompt_tokens": 12, "completion_tokens": 2**63, "total_tokens": 2**63 + 12},
         (12, 0, True)),
        ({"prompt_tokens": -4, "completion_tokens": 3}, (0, 3, True)),
        ({"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}, (12, 3, False)),
        ({"prompt_tokens": "12", "completion_tokens": float("nan")}, (0, 0, True)),
    ]),
    Kind("patterns without end", "tests/verifiers/test_text.py", graded, [
        (Regex(r"^(\w+\s?)+$"), "a" * 40 + "!", None, FAILED),
        (Regex(r"(x+x+)+y"), "x" * 60, None, FAILED),
        (Regex(r"^(\w+\s?)+$"), "a few words", None, 1.0),
    ]),
    Kind("caps of a search", "tests/store/test_caps.py", capped,
         [(seed, "") for seed in range(770_000, 770_040)]),
    Kind("damage of a journal", "tests/store/test_damage.py", damaged,
         [(number, "") for number in range(40)]),
]  # fmt: skip


def seen(kind: Kind, given: tuple[Any, ...]) -> Any:
    """Return what comes of an input."""
    try:
        return kind.see(*given)
    except (TfgrpoError, ProviderError, ValueError) as exc:
        if isinstance(exc, (TfgrpoError, ProviderError)) or type(exc).__name__ == "ReplyError":
            return FAILED
        return f"raw {exc!r}"
    except Exception as exc:  # what this benchmark counts
        return f"raw {exc!r}"


def main() -> None:
    """Measure and record."""
    logging.getLogger("tfgrpo").setLevel(logging.CRITICAL)
    wanted, rows, wrong = sys.argv[1:], [], []
    for kind in KINDS:
        if wanted and kind.name not in wanted:
            continue
        right = 0
        for *given, value in kind.cases:
            got = seen(kind, tuple(given))
            right += got == value
            if got != value:
                wrong.append({"kind": kind.name, "input": repr(given)[:200],
                              "got": repr(got)[:200], "wanted": repr(value)[:100]})  # fmt: skip
                print(wrong[-1], file=sys.stderr, flush=True)
        rows.append({"kind": kind.name, "cases": len(kind.cases), "right": right,
                     "tests": kind.tests})  # fmt: skip
    record(
        "field_kinds",
        {
            "kinds": len(rows),
            "cases": sum(row["cases"] for row in rows),
            "right": sum(row["right"] for row in rows),
            "rows": rows,
            "wrong": wrong,
        },
        "python -m tests.benchmarks.faults.field_kinds",
    )


if __name__ == "__main__":
    main()
