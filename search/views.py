"""The tree as text: a live ASCII view, Graphviz, Mermaid, JSON rows, and one HTML page.

Text from models and tools is data: control characters are taken out for terminals, quotes and
angle brackets are escaped for the others. The HTML page is one file without network access, with a
slider over the visits and the cost of each step by part.

Does not know how the tree was made. Source: own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import unicodedata
from collections.abc import Mapping
from typing import Any

from tfgrpo.search.node import Node, show_action
from tfgrpo.search.tree import Tree

__all__ = ["to_ascii", "to_graphviz", "to_html", "to_mermaid", "tree_rows"]

_MARKS = {
    "open": "·",
    "in_flight": "…",
    "expanded": "•",
    "terminal": "■",
    "dead": "✗",
    "pruned": "-",
}


def plain(text: str, limit: int = 200) -> str:
    """Return text that cannot steer a terminal: no control and no direction characters."""
    kept = "".join(c if unicodedata.category(c)[0] != "C" else " " for c in text[: limit * 2])
    kept = " ".join(kept.split())
    return kept if len(kept) <= limit else kept[: limit - 1] + "…"


def tree_rows(tree: Tree) -> list[dict[str, Any]]:
    """Return one JSON row a node in order of creation: the whole tree but for states."""
    return [_row(node) for node in tree]


def _row(node: Node) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": node.id,
        "parent": node.parent,
        "depth": node.depth,
        "action": node.action,
        "status": node.status,
        "seq": node.seq,
        "g": node.g,
        "h": node.h,
        "step_cost": node.step_cost,
        "prior": node.prior,
        "count": node.count,
        "visits": node.visits,
        "value_sum": node.value_sum,
    }
    for name in ("value", "reward", "observation", "error", "state_key"):
        value = getattr(node, name)
        if value is not None and value != "":
            row[name] = value
    if node.is_goal:
        row["is_goal"] = True
    if node.parts:
        row["parts"] = dict(node.parts)
    if node.usage is not None:
        row["usage"] = node.usage.to_dict()
    return row


def _label(node: Node, limit: int = 60) -> str:
    return "start" if node.parent < 0 else plain(show_action(node.action, limit), limit)


def _numbers(node: Node) -> str:
    found = [f"g={node.g:.2f}", f"h={node.h:.2f}"]
    if node.count > 1:
        found.append(f"×{node.count}")
    if node.value is not None:
        found.append(f"v={node.value:.2f}")
    if node.visits:
        found.append(f"n={node.visits}")
    return " ".join(found)


def to_ascii(
    tree: Tree, *, best: int | None = None, max_nodes: int = 60, max_depth: int | None = None
) -> str:
    """Return the tree as indented lines; the path to `best` is marked, the rest cut at a size.

    The most promising children come first. Marks: · open, … running, • expanded, ■ finished,
    ★ goal, ✗ failed, - pruned.
    """
    on_path = {n.id for n in tree.path(tree[best])} if best is not None else set()
    lines: list[str] = []
    stack: list[tuple[int, str, str]] = [(0, "", "")]
    while stack and len(lines) < max_nodes:
        node_id, lead, below = stack.pop()
        node = tree[node_id]
        mark = "★" if node.is_goal and node.is_terminal else _MARKS[node.status]
        arrow = " ◄" if node.id in on_path else ""
        lines.append(f"{lead}{mark} {_label(node)}  [{_numbers(node)}]{arrow}")
        if max_depth is not None and node.depth >= max_depth:
            continue
        ordered = sorted(node.children, key=lambda i: (i not in on_path, tree[i].g + tree[i].h, i))
        for i, child in reversed(list(enumerate(ordered))):
            last = i == len(ordered) - 1
            stack.append(
                (child, below + ("└ " if last else "├ "), below + ("  " if last else "│ "))
            )
    if stack:
        lines.append(f"… {len(tree) - len(lines)} more of {len(tree)} nodes")
    return "\n".join(lines)


_COLOURS = {"terminal": "#cfe8cf", "dead": "#f3d0d0", "pruned": "#e6e6e6", "expanded": "#dbe7f5"}


def to_graphviz(tree: Tree, *, best: int | None = None, max_nodes: int = 500) -> str:
    """Return the tree in Graphviz's language."""
    on_path = {n.id for n in tree.path(tree[best])} if best is not None else set()
    lines = ["digraph search {", '  node [shape=box, style=filled, fontname="sans-serif"];']
    for node in tree.first(max_nodes):
        text = _escaped(f"{_label(node)}\n{_numbers(node)}").replace("\n", "\\n")
        colour = "#f5dd90" if node.is_goal else _COLOURS.get(node.status, "#ffffff")
        wide = ", penwidth=3" if node.id in on_path else ""
        lines.append(f'  n{node.id} [label="{text}", fillcolor="{colour}"{wide}];')
        if node.parent >= 0:
            lines.append(f"  n{node.parent} -> n{node.id};")
    return "\n".join([*lines, "}"])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def to_mermaid(tree: Tree, *, best: int | None = None, max_nodes: int = 200) -> str:
    """Return the tree in Mermaid's language."""
    on_path = {n.id for n in tree.path(tree[best])} if best is not None else set()
    lines = ["flowchart TD"]
    for node in tree.first(max_nodes):
        text = f"{_label(node)}<br/>{_numbers(node)}"
        for sign, code in (("&", "#amp;"), ('"', "#quot;"), ("[", "#91;"), ("]", "#93;")):
            text = text.replace(sign, code)
        text = text.replace("<br/>", "\0").replace("<", "#lt;").replace(">", "#gt;")
        text = text.replace("\0", "<br/>")
        lines.append(f'  n{node.id}["{text}"]')
        if node.parent >= 0:
            lines.append(f"  n{node.parent} --> n{node.id}")
    if on_path:
        lines.append("  classDef best stroke-width:4px")
        lines.append(f"  class {','.join(f'n{i}' for i in sorted(on_path))} best")
    return "\n".join(lines)


def to_html(
    tree: Tree,
    *,
    best: int | None = None,
    title: str = "Search",
    facts: Mapping[str, Any] | None = None,
    max_nodes: int = 5_000,
) -> str:
    """Return one self-contained page: the tree, a slider over the visits, parts of each cost.

    Nothing is loaded from anywhere, scripts of others cannot run: all text stands in one JSON
    island with `<` escaped and reaches the page as text nodes.
    """
    from importlib.resources import files

    rows = tree_rows(tree)[:max_nodes]
    for row in rows:
        row["label"] = "start" if row["parent"] < 0 else plain(show_action(row["action"], 200))
        row.pop("action", None)
        for name in ("observation", "error"):
            if name in row:
                row[name] = plain(row[name], 1_000)
    path = [n.id for n in tree.path(tree[best])] if best is not None else []
    data = {
        "title": title,
        "facts": {str(k): str(v) for k, v in (facts or {}).items()},
        "nodes": rows,
        "best": path,
        "left_out": max(0, len(tree) - len(rows)),
    }
    island = json.dumps(data, ensure_ascii=True)
    for sign in "<>&":
        island = island.replace(sign, f"\\u{ord(sign):04x}")
    page = files("tfgrpo.search").joinpath("view.html").read_text(encoding="utf-8")
    script = page[page.rindex("<script>") + len("<script>") : page.rindex("</script>")]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page.replace("@SCRIPT_HASH@", allowed).replace("/*DATA*/", island)
