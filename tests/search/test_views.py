"""Views: nothing from a model can steer a terminal, a page or a graph language."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

from tfgrpo.search import BestFirst, Node, NodeScore, Proposal, SearchState, StepResult, call
from tfgrpo.search.state import VisitResult
from tfgrpo.search.views import to_ascii, to_graphviz, to_html, to_mermaid, tree_rows

EVIL = 'x</script><script>alert(1)</script>\x1b]0;title\x07\u202e"[/]'


def evil_tree() -> SearchState:
    fold = SearchState(BestFirst.astar())
    work = fold.select()
    assert work is not None
    actions: list[Any] = [call("open", door="red"), EVIL, "goal"]
    fold.commit(
        work,
        VisitResult(
            proposals=[Proposal(a) for a in actions],
            scores=[NodeScore(0.5, 1.0, None, {"g1": 0.25, "h1": 0.5})] * 3,
        ),
    )
    work = fold.select()
    assert work is not None
    fold.commit(work, VisitResult(outcome=StepResult("s", EVIL, is_terminal=True, is_goal=True)))
    return fold


def test_the_ascii_view_shows_status_numbers_and_the_best_path() -> None:
    fold = evil_tree()
    text = to_ascii(fold.tree, best=1)
    lines = text.splitlines()
    assert lines[0].startswith("• start") and lines[0].endswith("◄")
    assert lines[1] == "├ ★ open(door='red')  [g=0.50 h=1.00] ◄"
    assert len(lines) == 4
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e]", text)


def test_a_big_tree_is_cut_with_the_number_left_out() -> None:
    fold = SearchState(BestFirst.astar())
    for _ in range(30):
        work = fold.select()
        assert work is not None
        fold.commit(work, VisitResult(proposals=[Proposal("a"), Proposal("b")]))
    lines = to_ascii(fold.tree, max_nodes=10).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "… 51 more of 61 nodes"


def test_the_page_is_self_contained_and_text_stays_text() -> None:
    page = to_html(evil_tree().tree, best=1, title="<b>t</b>", facts={"calls": 3})
    assert "alert(1)</script>" not in page
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)
    island = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert island is not None
    data = json.loads(island[1])
    assert [n["seq"] for n in data["nodes"]] == [0, 1, 1, 1]
    assert data["nodes"][1]["parts"] == {"g1": 0.25, "h1": 0.5}
    assert data["best"] == [0, 1]
    script = page[page.rindex("<script>") + 8 : page.rindex("</script>")]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'" in page
    assert "innerHTML" not in script


def test_graph_languages_are_escaped() -> None:
    tree = evil_tree().tree
    dot = to_graphviz(tree, best=1)
    assert dot.count("->") == 3 and dot.startswith("digraph")
    for line in dot.splitlines():
        assert re.sub(r"\\.", "", line).count('"') % 2 == 0
    mermaid = to_mermaid(tree, best=1)
    assert mermaid.splitlines()[0] == "flowchart TD"
    assert "<script" not in mermaid and "class n0,n1 best" in mermaid


def test_rows_are_json_and_hold_the_whole_tree() -> None:
    rows = json.loads(json.dumps(tree_rows(evil_tree().tree)))
    assert [r["parent"] for r in rows] == [-1, 0, 0, 0]
    assert rows[1]["is_goal"] and rows[1]["status"] == "terminal"
    assert Node(0, -1, 0).mean_value == 0.0
