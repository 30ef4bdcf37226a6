"""The page as text: safe, self-contained, small."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import random
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.report.made import HOSTILE, made_run, rollout
from tests.report.pages_made import not_kept
from tfgrpo.report.embedded_groups import pack_groups
from tfgrpo.report.html import Html, h
from tfgrpo.report.markdown import render_markdown
from tfgrpo.report.page import render_page
from tfgrpo.report.summary import summarise
from tfgrpo.report.view import Decision, RunView
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


def test_nothing_on_the_page_is_raw_data(page: str) -> None:
    static = re.sub(r"<(script|style|svg).*?</\1>", "", page, flags=re.DOTALL)
    shown = re.sub(r"<[^>]+>", " ", static).replace("&#x27;", "'").replace("&quot;", '"')
    for raw in ("{'", '{"', "[{", "None", "': ", "_usd", "calls_low", "min_detectable"):
        assert raw not in shown, raw
    assert "Forecast before spending" in shown and "384 to 768" in shown  # calls of practice
    assert "20 s to 1 min 35 s" in shown
    assert "1 steps" not in shown and "1 changes" not in shown and "1 entries" not in shown
    numbers = re.findall(r"\d\.\d{5,}", shown)
    assert numbers == []


def test_a_reference_and_the_messages_reach_the_group_as_lines() -> None:
    view = made_run(tests=2, practice=2)
    first = view.groups[0]
    task = replace(first.task, reference={"order": 4711, "items": ["tea"]})
    islands = pack_groups(replace(view, groups=(replace(first, task=task),)))
    (group,) = unpacked(islands.chunks[0])
    assert group["reference"] == "order: 4711\nitems:\n  - tea"
    assert group["messages"] == [["system", "You sort messages of customers."],
                                 ["user", task.text]]  # fmt: skip


def test_a_reward_has_one_colour_in_every_run_of_a_verifier() -> None:
    view = made_run(tests=2, practice=2)
    assert unpacked(pack_groups(view).index)["range"] == [0.0, 1.0]
    bounds = Decision("rewards", "range", {"low": -1.0, "high": 3.0})
    told = replace(view, decisions=(*view.decisions, bounds))
    assert unpacked(pack_groups(told).index)["range"] == [-1.0, 3.0]


def test_groups_carry_what_a_person_may_look_for() -> None:
    view = made_run()
    entries = unpacked(pack_groups(view).index)["groups"]
    for entry, group in zip(entries, view.groups, strict=True):
        assert ("mixed" in entry["kinds"]) == group.is_informative()
        if group.rewards_G:
            assert ("failed" in entry["kinds"]) == (max(group.rewards_G) == 0.0)
    worse = {e["task_id"] for e in entries if "worse" in e["kinds"]}
    means = {
        (g.task.task_id, g.metadata["arm"]): sum(g.rewards_G) / len(g.rewards_G)
        for g in view.groups
        if g.metadata["stage"] == "test" and g.rewards_G
    }
    fell = {t for t, arm in means if arm == "final" and means[t, arm] < means.get((t, "empty"), -1)}
    assert worse == fell and fell


def test_a_run_that_goes_on_says_so_instead_of_a_verdict() -> None:
    view = made_run(tests=2, practice=4)
    groups = tuple(g for g in view.groups if g.metadata["stage"] != "test")
    open_now = replace(
        view, groups=groups, decisions=tuple(d for d in view.decisions if d.kind != "final")
    )
    page = render_page(open_now)
    assert "Not ended: learning so far" in page and "4 proposals tried so far, 3 accepted" in page
    assert "No verdict" not in page and "Kept: " not in page


def test_why_nothing_was_kept_stands_first_and_once_with_its_command() -> None:
    page = render_page(not_kept())
    summary = summarise(not_kept())
    assert summary["why_not_kept"]
    first = summary["why_not_kept"][0]
    assert first["cause"] == "critic_unread" and first["command"] in page
    assert page.count(html.escape(first["text"], quote=False)) == 1
    assert page.index("Why nothing was kept") < page.index("Test tasks, before and after")
    assert "Use what was learnt" not in page
