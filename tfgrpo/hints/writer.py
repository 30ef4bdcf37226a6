"""Hints written beforehand: an LM turns a task and its solution into three, or the solution is cut.

The LM may be the policy itself (self-hinting) or a stronger one (teacher). Replies are read
leniently: JSON anywhere in the text, labelled parts, or a numbered list; what cannot be read is
asked again, then replaced by the cut solution. Parse rate, leaks and fallbacks are reported.

Does not know schedulers or training. Idea: SAGE's tutoring call (arXiv 2602.03143), one call for
all levels; plain labelled text, since small models rarely write valid JSON, is own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tfgrpo.hint_plan import HintSource
from tfgrpo.hints.answer_leaks import leaks
from tfgrpo.hints.metadata import MetadataHints, solution_of
from tfgrpo.messages import Message
from tfgrpo.prompts import render
from tfgrpo.protocols import LM, Request, Sampling
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.runtime.lenient_json import ReplyError, json_values
from tfgrpo.runtime.thinking import without_thinking

LEVELS = 3
_NUMBERED = re.compile(
    r"^(?:[^\S\n]|[#*_>\[(<-])*+(?:(?:level|hint|step|strategy)[\s_-]*(\d{1,2})[\s*_:.)>\]-]*"
    r"|(\d{1,2})[\s*_]*[.):\]-][\s*_:.)-]*)",
    re.IGNORECASE | re.MULTILINE,
)
"""A label with its number, or a number with a dot or bracket behind it, as in a list."""
_MOST_CHARACTERS = 2000
"""Of one text; a longer one is no hint."""


@dataclass(frozen=True, slots=True)
class Written:
    """What writing hints gave and cost."""

    tasks: tuple[Task, ...]
    """The tasks in order, with `metadata.hints` and `metadata.hints_source`."""
    replies: int = 0
    parsed: int = 0
    """Replies that held three hints."""
    leaked: int = 0
    """Hints dropped because the answer stood in them."""
    fallbacks: tuple[str, ...] = ()
    """Ids of tasks whose hints are cut from the solution."""
    without: tuple[str, ...] = field(default=())
    """Ids of tasks that have no hint at all."""

    @property
    def parse_rate(self) -> float | None:
        """Share of replies that held three hints; None when nothing was asked."""
        return self.parsed / self.replies if self.replies else None


def parse_levels(reply: str) -> tuple[str, str, str] | None:
    """Return three hints from a reply, or None when there are not three.

    Looked for in this order: a JSON object with three texts (by key order of the level's number) or
    a JSON list of them; parts that start with `Level 1`, `Hint 1` or `<level_1>`, with any
    Markdown around; a list numbered 1 to 3. Text around is ignored.

    >>> parse_levels("Sure!\\n**Level 1:** a\\n**Level 2:** b\\nmore\\n**Level 3:** c")
    ('a', 'b more', 'c')
    >>> parse_levels('{"level_1": "a", "level_2": "b", "level_3": "c"}')
    ('a', 'b', 'c')
    >>> parse_levels("I cannot help.")
    """
    try:
        texts = read_texts(reply, LEVELS + 1)
    except ReplyError:
        return None
    return (texts[0], texts[1], texts[2]) if len(texts) == LEVELS else None


def read_texts(reply: str, most: int) -> tuple[str, ...]:
    """Return at most `most` texts of a reply: a JSON list, or numbered or labelled parts.

    Raises:
        ReplyError: there is none.

    >>> read_texts('Sure: {"hints": ["Add.", "Add two."]}', 3)
    ('Add.', 'Add two.')
    >>> read_texts("Level 1: Add.\\n\\n**2.** Add two.", 3)
    ('Add.', 'Add two.')
    """
    listed, lines = _listed(reply), _numbered(without_thinking(reply))
    texts = listed if len(listed) >= len(lines) else lines  # brackets in prose are short lists
    kept = [t for t in (" ".join(t.split()) for t in texts) if t and len(t) <= _MOST_CHARACTERS]
    if not kept:
        raise ReplyError("there is no JSON list of texts in it, and no numbered lines")
    return tuple(kept[:most])


def _listed(reply: str) -> list[str]:
    try:
        values = json_values(reply)
    except ReplyError:
        return []  # the numbered form is read next
    for value in values:
        found = _texts_in(value)
        if found:
            return found
    return []


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, list):
        rows = [r if isinstance(r, str) else _only_text(r) for r in value]
        return [r for r in rows if r] if all(rows) else []
    if isinstance(value, dict):
        by_level = {m[0]: v for k, v in value.items() if (m := re.findall(r"\d{1,9}", str(k)))}
        if len(by_level) == len(value) > 1:
            return _texts_in([by_level[k] for k in sorted(by_level, key=int)])
        lists = [v for v in value.values() if isinstance(v, list)]
        return _texts_in(lists[0]) if len(lists) == 1 else _texts_in(list(value.values()))
    return []


def _only_text(row: Any) -> str:
    """Return the one text of an object, such as {"level": 1, "hint": "Add."}."""
    texts = [v for v in row.values() if isinstance(v, str)] if isinstance(row, dict) else []
    return texts[0] if len(texts) == 1 else ""


def _numbered(reply: str) -> list[str]:
    """Return the parts under the numbers 1, 2, 3 …, in that order; closing tags are cut off."""
    marks: list[re.Match[str]] = []
    for mark in _NUMBERED.finditer(reply):
        if int(mark[1] or mark[2]) == len(marks) + 1:
            marks.append(mark)
    ends = [*(m.start() for m in marks[1:]), len(reply)][: len(marks)]
    parts = (reply[m.end() : end].strip() for m, end in zip(marks, ends, strict=True))
    return [re.sub(r"</?\w+>\s*$", "", part).strip().strip("*_") for part in parts]


@dataclass(frozen=True, slots=True)
class Form:
    """What a model is asked to write for a task."""

    prompt: Callable[[Task, str], str]
    """(task, solution) to the request."""
    read: Callable[[str], Any]
    """A reply to what it says; None where it cannot be read."""
    keep: Callable[[Task, Any, HintSource], tuple[Task, int]]
    """(task, what was read, writer) to the task with it, texts that hold the answer dropped, and
    how many those were; the task itself where none is left."""
    needs_solution: bool = True


@dataclass(frozen=True, slots=True)
class Asking:
    """How an LM is asked for texts."""

    source: HintSource = "self"
    """Whether the writer is the policy (`self`) or a `teacher`."""
    retries: int = 3
    """Further calls after an unreadable reply."""
    sampling: Sampling | None = None
    """None is temperature 1 and 512 tokens."""
    seed: int = 0
    solution_key: str = "solution"

    def options(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


async def write_hints(
    tasks: Sequence[Task],
    lm: LM,
    *,
    source: HintSource = "self",
    retries: int = 3,
    sampling: Sampling | None = None,
    seed: int = 0,
    solution_key: str = "solution",
) -> Written:
    """Return the tasks with three hints each, weakest first.

    A reply that does not hold three hints is asked again with another seed, `retries` times; then
    the solution is cut. Hints with the answer in them are dropped, not re-asked.

    Args:
        tasks: each with `metadata.solution` or a reference that serves as one.
        lm: the writer; its calls run at once, so bound it with a ledger or a retrying wrapper.
        source: whether the writer is the policy (`self`) or a `teacher`.
        retries: further calls after an unreadable reply, at least 0.
        sampling: how hints are drawn; None is temperature 1 and 512 tokens.
        seed: fixes the draws.
        solution_key: where the solution stands in a task's metadata.

    Raises:
        ProviderError: a call failed; what was written before is lost unless `lm` journals it.
    """
    asking = Asking(source, retries, sampling, seed, solution_key)
    written = await write_form(tasks, lm, HINTS, asking)
    cut = MetadataHints(levels=LEVELS, hints_key="", solution_key=solution_key, missing="plain")
    found: list[Task] = []
    fallbacks: list[str] = []
    without: list[str] = []
    for task in written.tasks:
        if task.task_id in written.without:
            kept = [p.text for p in cut(task)]
            (fallbacks if kept else without).append(task.task_id)
            found.append(with_hints(task, kept, "reference"))
        else:
            found.append(task)
    return replace(written, tasks=tuple(found), fallbacks=tuple(fallbacks), without=tuple(without))


async def write_form(tasks: Sequence[Task], lm: LM, form: Form, asking: Asking) -> Written:
    """Return the tasks with what a model wrote for each; those without it are named.

    Raises:
        ProviderError: a call failed.
    """
    calls = [asyncio.ensure_future(_ask(task, lm, form, asking)) for task in tasks]
    try:
        replies = await asyncio.gather(*calls)
    finally:
        for call in calls:  # a failure or cancellation leaves no call running
            call.cancel()
    made: list[Task] = []
    leaked = 0
    without: list[str] = []
    for task, (_, value) in zip(tasks, replies, strict=True):
        kept, n_leaks = (task, 0) if value is None else form.keep(task, value, asking.source)
        leaked += n_leaks
        if kept is task:
            without.append(task.task_id)
        made.append(kept)
    return Written(
        tasks=tuple(made),
        replies=sum(n for n, _ in replies),
        parsed=sum(value is not None for _, value in replies),
        leaked=leaked,
        without=tuple(without),
    )


def with_hints(task: Task, hints: Sequence[str], source: HintSource) -> Task:
    """Return the task with hints in its metadata, where `MetadataHints` looks for them."""
    extra = {"hints": list(hints), "hints_source": source}
    return replace(task, metadata={**task.metadata, **extra})


async def _ask(task: Task, lm: LM, form: Form, asking: Asking) -> tuple[int, Any]:
    solution = solution_of(task, asking.solution_key) or reference_text(task)
    if form.needs_solution and not solution:
        return 0, None
    sampling = asking.sampling or Sampling(temperature=1.0, max_tokens=512)
    request = Request((Message("user", form.prompt(task, solution)),), sampling=sampling)
    for attempt in range(asking.retries + 1):
        seed = derive_seed(asking.seed, task.task_id, "hint", attempt)
        drawn = await lm.complete(request, 1, [seed])
        value = form.read(drawn[0].text)
        if value is not None:
            return attempt + 1, value
    return asking.retries + 1, None


def reference_text(task: Task) -> str:
    """Return a reference that can be told as text, or an empty one."""
    value = task.reference
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value) if is_plain else ""


def _keep_hints(task: Task, hints: Sequence[str], source: HintSource) -> tuple[Task, int]:
    kept = [h for h in hints if not leaks(h, task)]
    return with_hints(task, kept, source) if kept else task, len(hints) - len(kept)


HINTS = Form(
    lambda task, solution: render("hint_write", task=task.text, solution=solution),
    parse_levels,
    _keep_hints,
)
"""Three hints."""
