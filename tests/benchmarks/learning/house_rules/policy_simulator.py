"""A policy that knows nothing but its prompt: a pure function of messages, seed and noise.

What it reads. The answer's format and the values that exist, from sentences of the instruction
(`language.answers`). The task: the last record in the last user turn. Rules in ordinary English
anywhere else in the prompt (`language.rules`): system text, lessons before the task, bullets of a
playbook, rules appended to an instruction, tables. Worked examples as chat turns or as text
(`language.cases`). No layout of any library is known.

What it does, part by part, earlier parts being facts for later ones:
1. A rule whose situation holds is followed: an exception said to be one ("always", "regardless")
   before others, then the one with more conditions, then the one said last; "otherwise" last.
2. Else, where a worked example's record agrees with the task's in at least `SIMILAR` of the fields,
   the part is copied from the most similar one; a notation is recognised and used, not copied.
3. Else it guesses: with chance `HABIT` its habit for this part and this kind of task, a fixed
   stand-in for common sense, else any value that exists. A value's usual notation is a habit too.
With chance `noise` a part slips: it is guessed although a rule or an example would settle it.

What it cannot do. It induces nothing over several examples, does no sums beyond "doubled" and
"lowered by 15", understands no sentence that names no value, and has no memory between calls.
It may import nothing from `families`; a test says so.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tests.benchmarks.learning.house_rules.language.answers import Shape, known_value, read_shape
from tests.benchmarks.learning.house_rules.language.cases import (
    Example,
    Message,
    text_examples,
    turn_examples,
)
from tests.benchmarks.learning.house_rules.language.effects import Rule, Words
from tests.benchmarks.learning.house_rules.language.formats import (
    AS,
    notations,
    read_notation,
    targets,
    write,
)
from tests.benchmarks.learning.house_rules.language.records import Record, find_records, number
from tests.benchmarks.learning.house_rules.language.rules import joined, read_rules

SIMILAR = 0.4
HABIT = 0.5
NUMBERS = ("1", "2", "3", "5", "10", "20", "50")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a prompt says."""

    shape: Shape
    record: Record
    rules: tuple[Rule, ...]
    examples: tuple[Example, ...]


def reply(messages: Sequence[Message], seed: int, noise: float = 0.0) -> str:
    """Return the policy's answer to a request."""
    prompt = read_prompt(messages)
    if prompt is None:
        return "I do not know what is asked."
    text = "\x1f".join(f"{role}\x1e{content}" for role, content in messages)
    rng = random.Random(f"{seed}\x1f{hashlib.sha256(text.encode()).hexdigest()}")
    parts: dict[str, str] = {}
    for part in prompt.shape.parts:
        guess = _guess(part, prompt, rng)
        slips = rng.random() < noise
        parts[part] = guess if slips else (_settled(part, prompt, parts) or guess)
    return prompt.shape.join(parts, prompt.record)


def read_prompt(messages: Sequence[Message]) -> Prompt | None:
    """Return what the prompt says, None where it holds no task or no format."""
    last = max((i for i, (role, _) in enumerate(messages) if role == "user"), default=-1)
    if last < 0:
        return None
    task = messages[last][1]
    records = find_records(task)
    if not records:
        return None
    record = records[-1].record
    line = task.rfind("\n", 0, records[-1].start) + 1
    before = (*messages[:last], ("user", task[:line]))
    shape = _shape(before) or _shape((*before, ("user", task)))
    if shape is None:
        return None
    examples, rules = _background(before, shape, tuple(record))
    return Prompt(shape, record, rules, examples)


@lru_cache(maxsize=256)
def _shape(messages: tuple[Message, ...]) -> Shape | None:
    return read_shape("\n".join(content for _, content in messages))


@lru_cache(maxsize=256)
def _background(
    messages: tuple[Message, ...], shape: Shape, fields: tuple[str, ...]
) -> tuple[tuple[Example, ...], tuple[Rule, ...]]:
    """Return the examples and rules in what stands before the task."""
    turns = [m for m in messages[:-1] if m[0] != "system"]
    spoken = [c for role, c in messages[:-1] if role == "system"]
    spoken += [
        messages[-1][1],
        *(c for _, c in turns if not find_records(c) and not shape.split(c)),
    ]
    found, prose = text_examples("\n\n".join(spoken), shape)
    rules = read_rules(prose, Words(shape.parts, fields, shape.options))
    return (*turn_examples(turns, shape), *found), tuple(rules)


def _settled(part: str, prompt: Prompt, parts: dict[str, str]) -> str | None:
    """Return what a rule or an example says about a part."""
    facts = joined(prompt.record)
    held = [
        (r.condition.is_default, r, i)
        for i, r in enumerate(prompt.rules)
        if r.part == part
        and r.condition.holds(facts, {k.replace(" ", "_"): v for k, v in parts.items()})
    ]
    values = [(d, r, i) for d, r, i in held if r.kind == "value"]
    value = None
    for _, rule, _ in sorted(
        values, key=lambda h: (not h[0], h[1].is_strong, h[1].condition.size, h[2]), reverse=True
    ):
        value = _as_written(rule.value, part, prompt)
        if value is not None:
            break
    if value is None:
        value = _copied(part, prompt)
    if value is None:
        return None
    best = max((r.condition.size for d, r, _ in held if r.kind != "value"), default=0)
    for default, rule, _ in held:
        if rule.kind != "value" and not default and rule.condition.size == best:
            return _changed(value, rule)
    return value


def _as_written(value: str, part: str, prompt: Prompt) -> str | None:
    """Return a rule's value, in the notation that it names where it names one."""
    options = prompt.shape.options.get(part, ())
    if options:
        return known_value(value, options) or value
    own = _own_field(part, prompt.record)
    if own and notations(own):
        notation = read_notation(value, own)
        if notation is None:
            notation = _by_example(value, own)
        return write(own, notation) if notation else None
    return value


def _by_example(value: str, own: str) -> str | None:
    """Return the notation of which a rule's value is an example, as in "like 2024/03/05"."""
    kinds = {n: "".join("9" if c.isdigit() else "a" if c.islower() else "A" if c.isupper() else c
                        for c in write(own, n) or "") for n in notations(own)}  # fmt: skip
    shape = "".join("9" if c.isdigit() else "a" if c.islower() else "A" if c.isupper() else c
                    for c in value.removeprefix("like ").strip())  # fmt: skip
    fits = [n for n, kind in kinds.items() if kind == shape]
    return fits[0] if len(fits) == 1 else None


def _own_field(part: str, record: Record) -> str | None:
    return next((v for k, v in record.items() if k.lower() == part.lower()), None)


def _changed(value: str, rule: Rule) -> str:
    base, by = number(value), float(rule.value)
    if base is None:
        return value
    changed = {"times": base * by, "plus": base + by, "minus": base - by}[rule.kind]
    return f"{changed:g}"


def _copied(part: str, prompt: Prompt) -> str | None:
    """Return a part as the most similar worked example has it."""
    best: Example | None = None
    best_score = 0.0
    for example in prompt.examples:
        score = _similarity(example.record, prompt.record)
        if score >= SIMILAR and score > best_score and part in example.parts:
            best, best_score = example, score
    own = _own_field(part, prompt.record)
    if own and notations(own):
        pool = [best] if best else list(prompt.examples)
        for example in pool:
            meant = targets(part, example.parts.get(part, ""), example.record)[0]
            if meant.startswith(AS):
                return write(own, meant.removeprefix(AS))
        return None
    return best.parts[part] if best else None


def _similarity(a: Record, b: Record) -> float:
    """Share of fields that agree; numbers agree by their ratio."""
    total = 0.0
    for name, value in b.items():
        other = a.get(name)
        x, y = number(value), number(other or "")
        if x is not None and y is not None and max(x, y) > 0:
            total += max(0.0, 1 - 2 * abs(x - y) / max(x, y))
        else:
            total += other is not None and other.casefold() == value.casefold()
    return total / max(1, len(b))


def _guess(part: str, prompt: Prompt, rng: random.Random) -> str:
    """Return what comes to mind: a habit, or any value."""
    own = _own_field(part, prompt.record)
    if own and notations(own):
        usual = notations(own)
        notation = usual[0] if rng.random() < HABIT else rng.choice(usual)
        return write(own, notation) or own
    options = prompt.shape.options.get(part, NUMBERS)
    if rng.random() >= HABIT:
        return rng.choice(options)
    kind = next(iter(prompt.record.values()), "")
    digest = hashlib.sha256(f"{part}\x1f{kind}".encode()).digest()
    return options[digest[0] % len(options)]
