"""What a report says of the flow `reflect`: counts, topics, the cost of a point, leniently read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learning.worlds import HELPFUL, World, settings
from tfgrpo.cli.library import find
from tfgrpo.report.markdown import render_markdown
from tfgrpo.report.reflection import claim_words, reflection
from tfgrpo.report.summary import summarise
from tfgrpo.report.view import load_view


def test_a_run_tells_its_panels_replays_topics_and_what_a_point_cost(tmp_path: Path) -> None:
    World(lesson=HELPFUL).learn(settings(tmp_path))
    view = load_view(tmp_path / "run")
    summary = summarise(view)
    found = summary["reflection"]
    assert found["panels"] >= 1 and found["improvable"] >= found["differing"] > 0
    cost, gain = found["cost"], summary["gain"]["estimate"]
    learning = [r for r in view.spend if r.stage != "test"]
    tokens = sum(r.usage.total_tokens for r in learning)
    assert cost["tokens"] == tokens
    assert cost["tokens_a_point"] == pytest.approx(tokens / (100 * gain))
    text = render_markdown(summary)
    assert "## Reflection" in text and "could teach" in text and "confirmed" in text
    entry = find(str(tmp_path / "run")).library.shown[0]
    assert entry.text == HELPFUL and "for " in claim_words(entry.to_dict())


def test_runs_of_other_flows_say_nothing_and_odd_rows_are_passed_over(tmp_path: Path) -> None:
    World(lesson=HELPFUL).learn(settings(tmp_path, learn={"preset": "contrast"}))
    assert reflection(load_view(tmp_path / "run"), None) is None
    assert claim_words({"claim": "none"}) == "" == claim_words({})
    assert claim_words({"claim": {"support": "t1", "state": 3}}) == "3"
