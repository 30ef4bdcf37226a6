"""Where in an answer the Python code is, and which of several pieces is meant.

Code stands in fenced blocks, in other containers (`[PYTHON]`, `<code>`, JSON, triple quotes), after
the prompts of a session, or bare between sentences. Nothing of it is repaired: a piece that is no
Python stays none.

Does not run anything. Source: own.
"""

from __future__ import annotations

import ast
import builtins
import html
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence

from tfgrpo.runtime.json_schema import load_json
from tfgrpo.runtime.json_text import fenced_blocks
from tfgrpo.runtime.syntax import syntax_tree

__all__ = ["code_in", "parse_code"]

SOLUTION = "Solution"
"""The class whose methods count as functions, as on LeetCode."""
_LANGUAGES = re.compile(r"(?:(?:i|c)?py(?:thon)?[\d.]*|pycon|python-repl|ipython|jupyter|pyodide)?")
_DOCUMENTS = ("md", "markdown", "mdx", "quarto", "rmd")
_LONG_NUMBER = re.compile(r"\b\d{1000,}\b")
_READS = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0|/dev/stdin|fileinput")
_PRINTS = re.compile(r"\bprint\s*\(|\bstdout\b")
_FAKES_INPUT = re.compile(r"\bstdin\s*=[^=]|StringIO\s*\(|\binput\s*=\s*lambda\b|\bpatch\s*\(")
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
_MOST_BARE = 200_000
"""Characters of an answer without fences that are looked through."""
_MOST_RUNS = 12
"""Runs of such lines that are tried as one piece: a text over several lines may hold prose."""
_MOST_TRIES = 4
"""How often the text may be parsed while pieces are tried."""

_Tree = tuple[str, ast.Module]


def code_in(answer: str, wanted: Collection[str] = (), *, is_program: bool = False) -> str | None:
    """Return the Python code of an answer; None where it has none.

    Of several pieces: the last that defines a wanted name (methods of `class Solution` count); for
    a program the last that reads or prints; else the last that parses. Names it uses and does not
    define come from the other pieces.

    >>> code_in("First:\\n```python\\nx = 1\\n```\\nBetter:\\n```python\\nx = 2\\n```")
    'x = 2\\n'
    >>> code_in("```py\\ndef f(): ...\\n```\\nUse it:\\n```py\\nf()\\n```", ["f"])
    'def f(): ...\\n'
    >>> code_in("So:\\n\\ndef f(): ...\\n\\nThat is all.", ["f"])
    'def f(): ...\\n'
    >>> code_in("I cannot.")
    """
    text = answer.replace("\r\n", "\n").lstrip("\ufeff")
    fenced = [b for b in fenced_blocks(_unquoted(text)) if b[1].strip()]
    if inner := [b for lang, body, _ in fenced if lang in _DOCUMENTS for b in fenced_blocks(body)]:
        fenced = inner  # the answer as a whole is one block
    blocks = [(lang, body) for lang, body, _ in fenced if _LANGUAGES.fullmatch(lang)]
    if not blocks:
        bare = _bare(text) if not fenced else []
        return _piece(bare, wanted, is_program=is_program) if bare else None
    if any(lang for lang, _ in blocks):
        # Where code is labelled as Python, an unlabelled block is output or a shell.
        named = [b for b in blocks if b[0]]
        blocks = named if not wanted or _defining(_trees(named), wanted) else blocks
    read = _trees(blocks)
    return _piece(read, wanted, is_program=is_program) if read else blocks[-1][1]


def parse_code(text: str) -> ast.Module | None:
    """Return the syntax tree of a text; None where it is no Python."""
    try:
        # Long numbers are right in a cell, but not in this process, which only looks at names.
        return syntax_tree(_LONG_NUMBER.sub("1", text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _piece(read: Sequence[_Tree], wanted: Collection[str], *, is_program: bool) -> str:
    chosen = _chosen(read, wanted, is_program=is_program)
    later = range(chosen + 1, len(read))
    order = [*_needed(read, chosen), chosen]
    if is_program and not _acts(read[chosen][1]):
        names = bound_names(read[chosen][1])
        order += [i for i in later if _used(read[i][1]) & names]
    parts = [read[i][0] for i in order] + [read[i][0] for i in _needed_later(read, order, later)]
    if len(parts) == 1:
        return parts[0]
    imports = dict.fromkeys(f.strip() for part in parts for f in _FUTURE.findall(part))
    return "\n".join([*imports, *(_FUTURE.sub("", part) for part in parts)])


def _chosen(read: Sequence[_Tree], wanted: Collection[str], *, is_program: bool) -> int:
    if defining := _defining(read, wanted):
        return defining[-1]
    if is_program:
        own = [i for i, (body, _) in enumerate(read) if not _FAKES_INPUT.search(body)]
        for pattern in (_READS, _PRINTS):
            if acting := [i for i in own or range(len(read)) if pattern.search(read[i][0])]:
                return acting[-1]
    return len(read) - 1


def _defining(read: Sequence[_Tree], wanted: Collection[str]) -> list[int]:
    return [i for i, (_, tree) in enumerate(read) if bound_names(tree) & set(wanted)]


def _needed(read: Sequence[_Tree], chosen: int) -> list[int]:
    """Return which earlier pieces define what a piece uses, in order."""
    found: list[int] = []
    missing = _missing(read[chosen][1])
    for i in range(chosen - 1, -1, -1):
        defined = bound_names(read[i][1])
        if defined & missing:
            found.insert(0, i)
            missing = (missing - defined) | _missing(read[i][1])
    return found


def _needed_later(read: Sequence[_Tree], order: Sequence[int], later: Sequence[int]) -> list[int]:
    missing = {name for i in order for name in _missing(read[i][1])}
    missing -= {name for i in order for name in bound_names(read[i][1])}
    return [i for i in later if i not in order and bound_names(read[i][1]) & missing]


def _missing(tree: ast.Module) -> set[str]:
    return _used(tree) - bound_names(tree) - set(dir(builtins))


def _used(tree: ast.Module) -> set[str]:
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    bound = {n.id for n in nodes if not isinstance(n.ctx, ast.Load)}
    return {n.id for n in nodes if isinstance(n.ctx, ast.Load)} - bound


def bound_names(tree: ast.Module) -> set[str]:
    """Return the names that a module's statements bind, and the methods of its `Solution`."""
    names: set[str] = set()
    for node in _statements(tree.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            if isinstance(node, ast.ClassDef) and node.name == SOLUTION:
                methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
                names |= {name for name in methods if not name.startswith("_")}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return names


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run in the module itself, those of its branches included."""
    for node in body:
        yield node
        if not isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, name, ()))
        for handler in getattr(node, "handlers", ()):
            yield from _statements(handler.body)


def _acts(tree: ast.Module) -> bool:
    """Whether a module does more than import and define."""
    quiet = (
        *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
        *(ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign),
    )
    return any(not isinstance(n, quiet) and not _is_text(n) for n in tree.body)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# --- from text to pieces --------------------------------------------------------------------------

_PROMPT = re.compile(r"[ \t]*(?:>>>|\.\.\.|In \[\d*\]:|\.\.\.:)(?: |$)(.*)")
_FIRST_PROMPT = re.compile(r"^[ \t]*(?:>>> |In \[\d*\]: )", re.MULTILINE)
_MAGIC = re.compile(r"^[ \t]*[%!][^\n]*$", re.MULTILINE)
_LABEL = re.compile(r"\A\s*(?:python3?|py|code|BEGIN|\[(?:PYTHON|CODE)\])[ \t]*:?[ \t]*\n", re.I)
_LABEL_END = re.compile(r"\n[ \t]*(?:END|DONE|\[(?:/PYTHON|/CODE|DONE|END)\])\s*\Z", re.I)
_ELEMENT = re.compile(r"<code[^<>]{0,200}>(.*?)</code>|<pre[^<>]{0,200}>(.*?)</pre>", re.DOTALL)
_TAG = re.compile(r"</?code[^<>]{0,200}>")
_FIELDS = ("code", "solution", "program", "python", "answer", "completion")
_CODE_LINE = re.compile(
    r"(?:async )?def \w|class \w+ ?[(:]|import \w|from [\w.]+ import |@\w|if __name__|print ?\("
    r"|[A-Za-z_][\w.]*(?: ?, ?[A-Za-z_]\w*){0,9} ?(?:\[[^\]]{0,80}\] ?)?(?:: ?[\w.\[\], ]{1,60})?"
    r"(?:[-+*/%|&^]|//|\*\*|>>|<<)?=(?!=)|#|[)\]}]"
    r"|(?:assert|raise|return|global|del|pass|break|continue)\b"
)
_BLOCK_LINE = re.compile(r"(?:if|elif|for|while|with|try|else|except|finally)\b")
_CALL_LINE = re.compile(r"[A-Za-z_][\w.]*\(")
_HEAD = 200
"""Characters of a line that tell whether it is code."""


def _is_code(line: str) -> bool:
    """Whether a line without its indentation looks like a statement and not like a sentence."""
    head, bare = " ".join(line[:_HEAD].split()), line.rstrip()
    return bool(
        _CODE_LINE.match(head)
        or (_BLOCK_LINE.match(head) and bare.endswith(":"))
        or (_CALL_LINE.match(head) and bare.endswith(")"))
    )


def _trees(blocks: Sequence[tuple[str, str]]) -> list[_Tree]:
    found = (_tree(body) for _, body in blocks)
    return [piece for piece in found if piece is not None]


def _tree(body: str) -> _Tree | None:
    """Return a block as Python: as it is, or without what an editor or session put around it."""
    for make in (str, textwrap.dedent, _typed, _without_magic):
        text = make(body.lstrip("\ufeff"))
        if text.strip() and (tree := parse_code(text)) is not None:
            return text, tree
    spans = _spans(body)
    if not spans:
        return None
    text = "\n".join(text for text, _ in spans)
    tree = parse_code(text)
    return None if tree is None else (text, tree)


def _typed(text: str) -> str:
    """Return what was typed into a session, without its prompts and what it printed."""
    if not _FIRST_PROMPT.search(text):
        return ""
    lines = [found[1] for line in text.split("\n") if (found := _PROMPT.match(line))]
    return "\n".join(lines) + "\n"


def _without_magic(text: str) -> str:
    return _MAGIC.sub("", text)


def _unquoted(text: str) -> str:
    """Return a text whose fences all stand in a Markdown quotation without its marks."""
    if "> ```" not in text or re.search(r"^[ \t]*```", text, re.MULTILINE):
        return text
    return re.sub(r"^[ \t]*> ?", "", text, flags=re.MULTILINE)


def _bare(text: str) -> list[_Tree]:
    """Return the pieces of code in an answer without fences."""
    text = text[:_MOST_BARE]
    inner = _contained(text)
    if inner is not None:
        text = inner
    text = _LABEL_END.sub("\n", _LABEL.sub("", text))
    if not text.strip():
        return []
    for form in (text, _typed(text)):
        if form.strip() and (tree := parse_code(form)) is not None:
            if len(tree.body) == 1 and _is_text(tree.body[0]):
                return _bare_text(tree.body[0]) or [(form, tree)]
            return [(form, tree)]
    return _spans(text)


def _bare_text(node: ast.stmt) -> list[_Tree]:
    """Return the code in a text that an answer put into triple quotes."""
    value = node.value.value if isinstance(node, ast.Expr) else ""  # type: ignore[attr-defined]
    body = _LABEL.sub("", str(value).removeprefix("python\n"))
    tree = parse_code(body)
    return [(body, tree)] if tree is not None and bound_names(tree) else []


def _contained(text: str) -> str | None:
    """Return the code of an answer that is one JSON object, one element, or in backticks."""
    whole = text.strip()
    if whole.startswith("{"):
        try:
            row = load_json(whole)
        except ValueError:
            row = None
        if isinstance(row, Mapping):
            return next((row[n] for n in _FIELDS if isinstance(row.get(n), str)), None)
    if elements := _ELEMENT.findall(text) if "</" in text else []:
        inner = (_TAG.sub("", a or b) for a, b in elements)
        return "\n".join(html.unescape(text).strip("\n") for text in inner)
    if whole.startswith("`") and whole.endswith("`") and whole.count("`") == 2:
        return whole.strip("`")
    return None


def _spans(text: str) -> list[_Tree]:
    """Return the longest runs of lines that are Python, between lines that are none."""
    lines = text[:_MOST_BARE].split("\n")
    runs = _runs(lines)
    allowed = _MOST_TRIES * sum(map(len, lines)) + 10_000
    found: list[_Tree] = []
    at = 0
    while at < len(runs):
        for last in range(min(len(runs), at + _MOST_RUNS) - 1, at - 1, -1):
            piece = "\n".join(lines[runs[at][0] : runs[last][1]])
            allowed -= len(piece)
            if allowed < 0:
                return found
            tree = _span(piece)
            if tree is not None:
                found.append(tree)
                at = last
                break
        at += 1
    return found


def _span(text: str) -> _Tree | None:
    text = textwrap.dedent(text).strip("\n") + "\n"
    tree = parse_code(text)
    if tree is None or any(isinstance(node, ast.Return) for node in _statements(tree.body)):
        return None
    return text, tree


def _runs(lines: Sequence[str]) -> list[tuple[int, int]]:
    """Return (first, behind the last) of each run of lines that look like code."""
    runs: list[tuple[int, int]] = []
    start = -1
    for i, line in enumerate([*lines, "."]):
        bare = line.strip()
        is_code = _is_code(bare) if start < 0 or line[:1].strip() else True
        if is_code and start < 0 and bare:
            start = i
        elif not is_code and start >= 0:
            runs.append((start, i))
            start = -1
    return runs
