"""The pages say what is true now: links lead somewhere, pictures and tables are current.

`python docs/_pictures.py` and `python -m tests.docs.papers` write what is made.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.docs.papers import BUILT, LEFT_OUT, PAGE, ROOT, file_of, page, reach_of, sure_of
from tfgrpo.statistics import choice_level, min_detectable

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
NEWCOMERS_WORDS = """informative spread gate look arm lever cut booked exemplar nudge interval
 candidate verifier rollout critic""".split()  # noqa: SIM905
RETIRED = (
    "measurably helps on tasks that nothing learnt from",
    "were never fit to be tried; the gate says which it was",
    "splits that overlap as a whole are refused, single near-duplicates are named; a library",
    "one rival ended for two seeds of three",
    "make any CPU engine crawl",
    "the share of tasks that could differ without having been met",
    "Where each group is uniform but one succeeded",
    "the less trained of equals is kept",
    "only a part of it can be had",
    "A/A noise of such a comparison",
)
"""Sentences that readers stumbled over."""


def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures_of_docs", DOCS / "_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_every_link_and_every_anchor_leads_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#?([^)\s]*)\)", path.read_text("utf-8")):
        if target.startswith("http") or not (target or anchor):
            continue
        place = path.parent / target if target else path
        assert place.exists(), f"{path.name} → {target}"
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place), f"{path.name} → {target}#{anchor}"


def test_the_pictures_are_current_and_each_page_of_a_module_has_one() -> None:
    module = pictures()
    for name, picture in module.PICTURES.items():
        kept = (DOCS / "pictures" / f"{name}.svg").read_text("utf-8")
        assert kept == module.draw(picture), "python docs/_pictures.py"
        assert ElementTree.fromstring(kept).tag.endswith("svg")
        page_of = DOCS / ("architecture.md" if name == "overview" else f"{name}.md")
        assert f"pictures/{name}.svg" in page_of.read_text("utf-8"), name


def test_arrows_of_a_picture_join_boxes_that_are_there() -> None:
    for name, picture in pictures().PICTURES.items():
        boxes = {box.partition("|")[0] for column in picture.columns for box in column}
        ends = {end for arrow in picture.arrows for end in arrow[:2]}
        assert ends == boxes, name
        assert picture.strong <= boxes, name


def test_the_index_of_papers_is_current_and_names_what_exists() -> None:
    assert PAGE.read_text("utf-8") == page(), "python -m tests.docs.papers"
    for name, (idea, parts) in BUILT.items():
        assert idea and parts, name
        for part in parts:
            assert (ROOT / file_of(part)).is_file(), (name, part)
            assert sure_of(part) in ("code", "paper", "approximation", "own"), (name, part)
            assert reach_of(part), (name, part)
    left = [system for systems in LEFT_OUT.values() for system in systems]
    assert len(left) == len(set(left)) and not set(left) & BUILT.keys()


def test_every_way_to_switch_a_system_on_is_a_setting() -> None:
    from tfgrpo.cli.config import extra_of, model_of
    from tfgrpo.config.reference import parts_of

    known = {
        f"{part.name}.{key.name}"
        for verb in ("learn", "train", "search")
        for part in parts_of(model_of(verb), "", extra_of(verb))
        for key in part.keys
    }
    open_tables = {"hints.name", "verifier.kind"}
    for _, parts in BUILT.values():
        for part in parts:
            for key in re.findall(r"`([a-z_]+\.[a-z_]+)\b", reach_of(part)):
                assert key in known | open_tables, reach_of(part)


def test_the_sizes_that_the_page_names_are_those_of_the_formula() -> None:
    text = (DOCS / "why.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    assert len(rows) >= 6
    for tasks, two, four in rows:
        for draws, shown in ((2, two), (4, four)):
            found = min_detectable(int(tasks), draws, level=choice_level(1))
            assert f"{found:.2f}" == shown, (tasks, draws)


def test_every_cause_that_a_run_can_name_stands_on_the_page() -> None:
    from typing import get_args

    from tfgrpo.diagnosis import Cause

    named = re.findall(r"^\| `(\w+)` \|", (DOCS / "why.md").read_text("utf-8"), re.M)
    assert sorted(named) == sorted(get_args(Cause))


def test_the_words_of_newcomers_are_explained() -> None:
    terms = " ".join(re.findall(r"^\| ([^|]+) \|", (DOCS / "glossary.md").read_text("utf-8"), re.M))
    assert [w for w in NEWCOMERS_WORDS if w not in terms] == []


@pytest.mark.parametrize("sentence", RETIRED)
def test_a_sentence_that_readers_stumbled_over_is_gone(sentence: str) -> None:
    sources = [*PAGES, *(ROOT / "tfgrpo").rglob("*.py")]
    found = [p.name for p in sources if sentence in " ".join(p.read_text("utf-8").split())]
    assert found == []


def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((DOCS / "tutorial.ipynb").read_text("utf-8"))["cells"]
    names: dict[str, object] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs are made by the reader"
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "verdict met beyond noise" in printed
    assert "0 of 12 practice groups differ in reward" in printed
    assert "kept 0." in printed


def test_sizes_of_an_installation_are_told() -> None:
    for path in (ROOT / "README.md", DOCS / "start.md"):
        text = path.read_text("utf-8")
        assert "1.5 GB" in text and "300 MB" in text, path.name
    assert "https://download.pytorch.org/whl/cpu" in (DOCS / "start.md").read_text("utf-8")
