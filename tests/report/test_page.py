"""The page as text: safe, self-contained, small."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import random
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.report.made import HOSTILE, made_run, rollout
from tfgrpo.report.embedded_groups import pack_groups
from tfgrpo.report.html import Html, h
from tfgrpo.report.markdown import render_markdown
from tfgrpo.report.page import render_page
from tfgrpo.report.summary import summarise
from tfgrpo.report.view import RunView
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.redaction import forget_secrets, register


class Elements(HTMLParser):
    """Every element with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(made_run())


def unpacked(island: str) -> object:
    return json.loads(gzip.decompress(base64.b64decode(island)))


def test_text_becomes_text_and_attributes_are_quoted() -> None:
    assert h("p", "<i>", class_='a" onclick="x') == (
        '<p class="a&quot; onclick=&quot;x">&lt;i&gt;</p>'
    )
    assert isinstance(h("br"), Html)
    assert h("p", None, False, True, 0, 1.5) == "<p>01.5</p>"


def test_the_page_needs_no_network(page: str) -> None:
    parser = Elements()
    parser.feed(page)
    loads = [
        value
        for tag, attributes in parser.found
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data", "poster", "srcset")
        and not str(value).startswith("#")
    ]
    assert loads == []
    assert not {t for t, _ in parser.found} & {"link", "iframe", "img", "object", "embed", "base"}
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", page)


def test_the_policy_allows_our_script_by_its_hash_and_nothing_else(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1].replace("&#x27;", "'")
    assert "default-src 'none'" in policy[1].replace("&#x27;", "'")


def test_without_matplotlib_the_page_lacks_charts_alone_and_says_so_once(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bare = render_page(made_run())
    assert (page.count("<svg"), bare.count("<svg")) == (12, 0)
    assert (page.count("tfgrpo[report]"), bare.count("tfgrpo[report]")) == (0, 1)
    parsed, bare_parsed = Elements(), Elements()
    parsed.feed(re.sub("<svg.*?</svg>", "", page, flags=re.DOTALL))
    bare_parsed.feed(bare)
    tables = [sum(tag == "tr" for tag, _ in p.found) for p in (parsed, bare_parsed)]
    assert tables[0] == tables[1] > 0


def test_hostile_text_makes_no_element_and_no_attribute(page: str) -> None:
    parser = Elements()
    parser.feed(page)
    assert all(not name.startswith("on") for _, attributes in parser.found for name in attributes)
    assert "<script>window.owned" not in page
    assert page.count("</script>") == len(re.findall(r"<script[ >]", page))
    assert "&lt;script&gt;window.owned" in page  # it is shown, as text


def test_control_and_bidirectional_characters_are_shown_as_escapes(page: str) -> None:
    for character in ("\x1b", "\x07", "\u202e"):
        assert character not in page
    islands = pack_groups(made_run())
    for chunk in islands.chunks:
        text = json.dumps(unpacked(chunk), ensure_ascii=False)
        assert "\u202e" not in text and "\\u001b" not in text


def test_a_known_secret_reaches_neither_page_nor_islands() -> None:
    secret = "canary-9f8e7d6c5b4a39281706"
    view = made_run(tests=2, practice=2)
    first = view.groups[0]
    spilled = rollout(first.rollouts[0].rollout_id, first.task.task_id, 0.0, f"my key is {secret}")
    group = replace(first, rollouts=(spilled, *first.rollouts[1:]))
    try:
        register(secret)
        page = render_page(replace(view, name=secret, groups=(group, *view.groups[1:])))
        islands = pack_groups(replace(view, groups=(group,)))
    finally:
        forget_secrets()
    assert secret not in page
    assert secret not in json.dumps([unpacked(c) for c in islands.chunks])


def test_equal_views_give_equal_pages() -> None:
    assert render_page(made_run(tests=4)) == render_page(made_run(tests=4))


def test_a_run_of_nothing_has_a_page() -> None:
    page = render_page(RunView("empty"))
    assert "No verdict: too little could be scored" in page
    assert "Nothing was rejected." in page


def test_every_group_is_in_the_islands_with_rollouts_contrast_and_summary() -> None:
    view = made_run()
    islands = pack_groups(view)
    groups = [g for chunk in islands.chunks for g in unpacked(chunk)]
    index = unpacked(islands.index)
    assert [g["group_id"] for g in groups] == [g.group_id for g in view.groups]
    assert [e["group_id"] for e in index["groups"]] == [g.group_id for g in view.groups]
    assert groups[0]["rollouts"][0]["summary"].startswith("<script>")
    contrast = next(d for d in view.decisions if d.kind == "contrast")
    (row,) = [g for g in groups if g["group_id"] == contrast.payload["group_id"]]
    assert row["contrast"].startswith("Good attempts kept to the label.")
    assert islands.n_cut == 0


def test_ten_thousand_rollouts_of_incompressible_text_stay_under_five_megabytes() -> None:
    rng = random.Random(0)
    texts = [rng.randbytes(500).hex() for _ in range(10_000)]
    groups = []
    for i in range(1250):
        task_id = f"t{i}"
        rollouts = tuple(
            rollout(f"r{i}-{n}", task_id, float(n % 2), texts[i * 8 + n]) for n in range(8)
        )
        metadata = {"stage": "practice", "step": i // 250}
        groups.append(
            RolloutGroup(f"g{i}", Task(task_id, f"task {i}"), rollouts, metadata=metadata)
        )
    view = RunView("large", groups=tuple(groups))
    page = render_page(view)
    assert len(page.encode()) < 5_000_000
    assert "keep head and tail here" in page


def test_markdown_of_hostile_text_has_no_active_part() -> None:
    text = render_markdown(summarise(made_run()))
    assert "<script" not in text and "](" not in text.replace("\\]\\(", "")
    assert "\x1b" not in text and "\u202e" not in text
    assert "http:\\//evil" in text  # no autolink
    rows = [line for line in text.splitlines() if line.startswith("| E1 ")]
    assert len(rows) == 1 and rows[0].count(" | ") == 5
    assert HOSTILE not in text
