"""The forms in which prompts want a critic's findings: instruction, JSON, tag, marked fields.

Each form is read from the prompt: a JSON reply fills the skeleton that the prompt shows, key by
key, by what the key's name means in English. Does not know which library asks.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.learning.house_rules.language.answers import Shape, read_json
from tests.benchmarks.learning.house_rules.language.evidence import CaseSeen
from tests.benchmarks.learning.house_rules.language.records import find_records
from tests.benchmarks.learning.house_rules.statements import (
    Statement,
    head,
    is_base,
    merged,
    parts_of,
)

RULES = "Rules:"
CASES = "Cases seen:"
MAX_CASES = 48
_LINE = re.compile(
    r"^\W*\[?([A-Za-z][A-Za-z_-]*\d[\w-]*|[A-Z]\d+)\]?[.:]?\s+"
    r"(?:(?:add|update|delete|keep|modify)\b(?: \[?[A-Za-z_-]*\d[\w-]*\]?)?:?\s+)?(.+)$",
    re.I,
)
_PROPOSALS = re.compile(
    r"^[^\n]*\b(?:proposals|proposed changes|new insights|new experiences|new lessons|"
    r"operations that name no entry)\b[^\n]*:", re.I | re.M,
)  # fmt: skip
_LIBRARY = re.compile(
    r"^[^\n]*\b(?:library|playbook|list|entry with the operations[^\n]*)\b[^\n]*:", re.I | re.M
)


def case_lines(cases: Sequence[CaseSeen], shape: Shape | None) -> list[str]:
    """Return the cases whose key is known, one a line."""
    lines = []
    for case in cases[-MAX_CASES:]:
        answer = case.answer or (_written(case, shape) if shape else "")
        if answer:
            inner = "; ".join(f"{k}: {v}" for k, v in case.record.items())
            lines.append(f"- [{inner}] → {answer.replace(chr(10), ' / ')}")
    return lines


def _written(case: CaseSeen, shape: Shape) -> str:
    if any(p not in case.key for p in shape.parts):
        return ""
    if shape.form == "calls" and not shape.arguments:
        return ""
    return shape.join(case.key, case.record)


def instruction(
    text: str, found: Sequence[Statement], cases: Sequence[CaseSeen], shape: Shape | None
) -> str:
    """Return the instruction that stands in the prompt with what was learnt, in backticks."""
    m = re.search(r"```\w*\n(.*?)\n?```", text, re.S)
    current = m[1] if m else ""
    own = current.split(f"\n\n{RULES}")[0].strip()
    lines = [own, "", RULES, *(f"- {s.text}" for s in found)]
    known = case_lines(cases, shape)
    if known:
        lines += ["", CASES, *known]
    return "```\n" + "\n".join(lines) + "\n```"


def tagged(text: str, tag: str, found: Sequence[Statement]) -> str:
    """Return one statement a line inside a tag."""
    return f"<{tag}>\n" + "\n".join(s.text for s in found) + f"\n</{tag}>"


def account_of_attempt(cases: Sequence[CaseSeen], shape: Shape | None) -> str:
    """Return an account of the attempts of a prompt, with feedback and key as it has them."""
    lines = []
    for case in cases:
        inner = "; ".join(f"{k}: {v}" for k, v in case.record.items())
        for attempt in case.attempts:
            answer = shape.join(attempt.parts, case.record) if shape else str(attempt.parts)
            verdicts = [f"{p}: {'right' if ok else 'wrong'}" for p, ok in attempt.verdicts.items()]
            lines += [f"For [{inner}] the agent answered:", answer, "; ".join(verdicts) + "."]
        if case.answer:
            lines += ["The right answer is:", case.answer]
    return "\n".join(lines) or "The agent answered at once; nothing else was decided."


def marked_fields(
    text: str, found: Sequence[Statement], cases: Sequence[CaseSeen], shape: Shape | None
) -> str:
    """Return DSPy's output fields: a mapping where the field is one, else text."""
    asked = text.split("Your output fields are:")[-1]
    fields = re.findall(r"^\d+\. `(\w+)` \(([^)]*)\)", asked, re.M)
    names = re.findall(r"\[\[ ## module_names ## \]\]\s*\[(.*?)\]", text, re.S)
    modules = re.findall(r"[\"'«]*(?:\[\d+\] )?[\"'«]?([\w.]+)", names[-1]) if names else ["self"]
    lines = [s.text for s in found] + [
        "Cases seen:",
        *case_lines([c for c in cases if c.attempts], shape),
    ]
    advice = "\n".join(lines)
    out = []
    for name, kind in fields:
        value = (
            json.dumps(dict.fromkeys(modules, advice))
            if "dict" in kind
            else "Compared with the key."
        )
        out.append(f"[[ ## {name} ## ]]\n{value}")
    return "\n\n".join([*out, "[[ ## completed ## ]]"])


def operations(text: str) -> str | None:
    """Return edits of a library where the prompt shows proposals; None where it shows none."""
    m = _PROPOSALS.search(text)
    if not m or not re.search(r'"(?:op|operation)"', text):
        return None
    before, after = text[: m.start()], text[m.end() :]
    at = _LIBRARY.search(before)
    library = _entries(before[at.end() :] if at else "")
    proposals = _entries(
        after.split("\nReply with")[0].split("\nDecide")[0].split("\nReconcile")[0]
    )
    if re.search(r"operations that name it", before, re.I):
        proposals = _entries(before[at.end() :] if at else "") + proposals
        library = []
    by_head = {head(body): (name, body) for name, body in library}
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, body in proposals:
        groups.setdefault(head(body), []).append((name, body))
    edits: list[dict[str, Any]] = []
    for about, group in groups.items():
        names, bodies = [n for n, _ in group], [b for _, b in group]
        entry, old = by_head.get(about, (None, None))
        whole = merged([old, *bodies] if old else bodies)
        kind = "add" if old is None else "keep" if whole == old else "update"
        if whole:
            edits.append({"op": kind, "id": entry, "text": whole, "from": names})
        else:
            edits.append({"op": "drop", "id": None, "text": "", "from": names})
    if find_records(before) and re.search(r"\bremove\b", text, re.I):
        edits += _obsolete(library, [body for _, body in proposals], edits)
    return _in_their_words(text, edits)


def _obsolete(
    library: Sequence[tuple[str, str]], news: Sequence[str], edits: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the entries to remove: what is said of parts of which the news give a whole account.

    The news were induced from all cases that stand in the library, so older sayings about the same
    parts are out of date.
    """
    whole = {parts[0] for body in news if (parts := parts_of(body)) and is_base(body)}
    kept = {e["id"] for e in edits}
    return [
        {"op": "remove", "id": name, "text": "", "from": []}
        for name, body in library
        if name not in kept and (parts := parts_of(body)) and set(parts) <= whole
    ]


def _entries(text: str) -> list[tuple[str, str]]:
    """Return the entries of a list: lines with an id, objects with a content, or plain lines."""
    found = []
    for raw in re.findall(r"\[\{.*?\}\]", text, re.S):
        try:
            rows = ast.literal_eval(raw)
        except (ValueError, SyntaxError):
            continue
        return [(str(i), str(r.get("content", ""))) for i, r in enumerate(rows)]
    rows = [o for o in (read_json(x) for x in text.splitlines() if "{" in x) if isinstance(o, dict)]
    if rows:
        return [
            (str(r.get("id") or i), str(r.get("content", r.get("text", ""))))
            for i, r in enumerate(rows)
        ]
    for line in text.splitlines():
        m = _LINE.match(line)
        if m:
            found.append((m[1], re.sub(r"\s*\(helpful=[^)]*\)", "", m[2]).strip()))
        elif re.match(r"\s*(?:[-*]|\d+[.)])\s+\S|\w.* is |When ", line) and "<<" not in line:
            found.append((str(len(found)), re.sub(r"^\s*(?:[-*]|\d+[.)])\s+", "", line).strip()))
    return found


def _in_their_words(text: str, edits: Sequence[Mapping[str, Any]]) -> str:
    """Return the edits with the keys and the case of names that the prompt's skeleton has."""
    is_upper = bool(re.search(r'"(?:op|operation)": "(?:ADD|UPDATE)"', text))
    long = '"operation"' in text
    target = "target_id" if '"target_id"' in text else "id"
    body = "content" if '"content"' in text else "text"
    rows = []
    for edit in edits:
        kind = str(edit["op"])
        if kind in ("drop", "keep") and f'"{kind}"' not in text and "NONE" not in text:
            continue
        if '"NONE"' in text or "or NONE" in text:
            kind = "none" if kind == "keep" else kind
        row: dict[str, Any] = {"operation" if long else "op": kind.upper() if is_upper else kind}
        if edit["id"] is not None or long:
            row[target] = edit["id"]
        words = str(edit["text"])
        row[body] = f"house rule: {words}" if "short name:" in text and ":" not in words else words
        if '"from"' in text:
            row["from"] = edit["from"]
        if '"section"' in text:
            row["section"] = "domain_concepts"
        rows.append(row)
    is_wrapped = bool(re.search(r'\{\s*"operations"', text))
    return json.dumps({"operations": rows} if is_wrapped else rows, ensure_ascii=False)


def skeleton_reply(
    text: str, found: Sequence[Statement], cases: Sequence[CaseSeen], shape: Shape | None
) -> str:
    """Return JSON of the form that the prompt shows last, filled with the statements."""
    skeleton = _skeleton(text)
    extra: list[Statement] = []
    if re.search(r"do not summarize away detail|\binsights\b", text, re.I):
        extra = [Statement(line[2:], "", "", "", ()) for line in case_lines(cases[-1:], shape)]
    return json.dumps(_fill(skeleton, [*found, *extra], cases), ensure_ascii=False)


def _skeleton(text: str) -> Any:
    """Return the last JSON skeleton of a prompt as lists, mappings and strings."""
    for m in reversed(list(re.finditer(r"[{\[]\s*[{\"]", text))):
        node = _parse(text[m.start() :])
        if _is_form(node):
            outer = _outermost(text, m.start())
            return outer if outer is not None else node
    return {"rules": [{"rule": "text"}]}


def _outermost(text: str, start: int) -> Any:
    """Return the skeleton that encloses the one at `start`, None where there is none."""
    best = None
    for m in re.finditer(r"[{\[]\s*[{\"]", text[:start]):
        parsed, used = _scan(text[m.start() :])
        if _is_form(parsed) and m.start() + used > start and m.start() > start - 3000:
            return parsed
    return best


def _is_form(node: Any) -> bool:
    """True for a form whose keys ask for words or an operation; False for data."""
    if isinstance(node, list):
        return any(_is_form(n) for n in node)
    if not isinstance(node, dict):
        return False
    keys = {k.lower() for k in node}
    return bool(keys & {*_ITEMS, "op", "operation"}) or any(_is_form(v) for v in node.values())


def _parse(text: str) -> Any:
    return _scan(text)[0]


def _scan(text: str) -> tuple[Any, int]:
    """Parse JSON that may hold <placeholders>, "a" | "b" and "…"; returns value and length."""
    depth, end, quoted = 0, 0, False
    for i, ch in enumerate(text[:4000]):
        if ch == '"' and text[i - 1 : i] != "\\":
            quoted = not quoted
        if quoted:
            continue
        depth += ch in "[{"
        depth -= ch in "]}"
        if depth == 0:
            end = i + 1
            break
    body = text[:end]
    body = re.sub(r'"(?:\s*\|\s*"[^"]*")+', '"', body)
    body = re.sub(r"<[^<>\"]*>", "0", re.sub(r'"<[^<>]*>"', '"text"', body))
    body = re.sub(r",?\s*(?:…|\.\.\.)\s*(?=[\]}])", "", body)
    body = re.sub(r":\s*(?:number|integer|float|0\.\.1|0-1)\b", ": 0", body)
    body = re.sub(r":\s*(?:string|text)\b", ': "text"', body)
    try:
        return json.loads(body), end
    except ValueError:
        return None, 0


_TEXT = {
    "lesson",
    "text",
    "content",
    "rule",
    "experience",
    "insight",
    "statement",
    "advice",
    "sentence",
}
_ITEMS = (*_TEXT, "do", "then", "what", "action_to_take")


def _fill(node: Any, found: Sequence[Statement], cases: Sequence[CaseSeen]) -> Any:
    if isinstance(node, list):
        if node and isinstance(node[0], dict):
            return [_object(node[0], s, cases) for s in found]
        return [s.text for s in found]
    out: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            names = {k.lower() for k in value[0]}
            is_main = bool(names & set(_ITEMS)) and not names & {"verdict", "status"}
            out[key] = [_object(value[0], s, cases) for s in found] if is_main else []
        elif isinstance(value, list):
            main = key.lower() in {f"{t}s" for t in _TEXT}
            out[key] = [s.text for s in found] if main else []
        elif isinstance(value, str):
            out[key] = "The keys show which value belongs to which situation."
        else:
            out[key] = value
    return out


def _object(form: Mapping[str, Any], s: Statement, cases: Sequence[CaseSeen]) -> dict[str, Any]:
    return {key: _entry(key.lower(), value, s, form) for key, value in form.items()}


def _entry(key: str, value: Any, s: Statement, form: Mapping[str, Any]) -> Any:
    has_situation = bool({"situation", "when", "if"} & {k.lower() for k in form})
    if key in ("situation", "when", "if"):
        return s.situation
    if key in ("do", "then", "what") or (key in _TEXT and has_situation and "do" not in form):
        return s.do if key in ("do", "then", "what") else s.text
    if key in _TEXT:
        return s.text
    if key in ("op", "operation"):
        return value if isinstance(value, str) and value.lower() == "add" else "add"
    if key in ("topic", "part"):
        return s.part
    if key == "section":
        return "domain_concepts"
    if key in ("attempts", "groups"):
        return [1]
    if re.search(r"against|counter|contradict|refut", key):
        return list(s.against)
    if re.search(r"support|task|evidence|^for$|cites?", key):
        return list(s.support) if isinstance(value, list) else ", ".join(s.support)
    if re.search(r"sure|confiden", key):
        share = len(s.support) / max(1, len(s.support) + len(s.against))
        if isinstance(value, str):
            return "high" if len(s.support) > 1 else "low"
        return round(share if len(s.support) > 1 else 0.5, 2)
    if re.search(r"settle|open|question", key):
        return "" if len(s.support) > 1 else f"another task where {s.situation}"
    return [] if isinstance(value, list) else None if value is None else ""
