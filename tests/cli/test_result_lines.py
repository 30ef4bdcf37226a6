"""The lines of a result: one total of the spend, one interval for one number, words for people."""

from __future__ import annotations

import re
from pathlib import Path

from tests.learning.worlds import HELPFUL, World, settings
from tfgrpo.cli.result_lines import result_lines, spend_lines
from tfgrpo.report.summary import summarise
from tfgrpo.report.view import load_view
from tfgrpo.rollout import Usage
from tfgrpo.store.fold import SpendRow

NOTHING = Usage()


def row(stage: str, usage: Usage, booked: Usage = NOTHING, failed: int = 0) -> SpendRow:
    return SpendRow(stage, "m", usage, Usage(), booked, failed, 0, 0.0)


def test_the_total_is_what_the_caps_have_counted_booked_calls_told_apart() -> None:
    lines = spend_lines(
        [
            row("practice", Usage(100, 0, 0, 20, 0, 3, 0.01)),
            row("panel", Usage(50, 0, 0, 5, 0, 1, 0.02), Usage(900, 0, 0, 400, 0, 2, 0.3), 2),
        ]
    )
    assert lines[-1] == (
        "spent: in all 4 calls, 150 + 25 tokens, $0.0300; at most 2 calls, 900 + 400 tokens, "
        "$0.3000 more, of calls whose end nobody saw"
    )
    assert "2 of them failed" in lines[1]


def test_one_number_has_one_interval_on_screen_and_in_the_report(tmp_path: Path) -> None:
    result = World(lesson=HELPFUL).learn(settings(tmp_path, learn={"seed": 3}))
    screen = "\n".join(result_lines(result))
    (pair,) = re.findall(r"paired difference: +[\d.]+ \(95% interval ([\d.]+ to [\d.]+)", screen)
    (verdict,) = re.findall(r"gain [\d.]+ \(95% interval ([\d.]+ to [\d.]+)\)", screen)
    gain = summarise(load_view(tmp_path / "run"))["gain"]
    assert pair == verdict == f"{gain['low']:.3f} to {gain['high']:.3f}"


def test_no_interval_leaves_the_range_of_rewards(tmp_path: Path) -> None:
    World(base=0.9, lesson="").learn(settings(tmp_path, tasks={"test": 4}))
    summary = summarise(load_view(tmp_path / "run"))
    found = [a["mean"] for a in summary["arms"]]
    found += [p[k] for p in summary["curve"] for k in ("practice", "current", "proposed") if p[k]]
    found += [b for a in summary["arms"] for b in a["best_of"]]
    assert found and all(0.0 <= x["low"] <= x["estimate"] <= x["high"] <= 1.0 for x in found)


def test_both_arms_are_told_by_one_measure(tmp_path: Path) -> None:
    result = World(lesson=HELPFUL).learn(settings(tmp_path))
    arms = summarise(load_view(tmp_path / "run"))["arms"]
    assert result.outcome.is_kept and len(arms) == 2
    assert len({a["is_binary"] for a in arms}) == 1


def test_a_result_prints_in_a_few_lines_and_shows_in_a_notebook(tmp_path: Path) -> None:
    result = World(lesson=HELPFUL).learn(settings(tmp_path))
    assert len(str(result)) < 400 and "kept, 1 entries" in str(result)
    assert "<td>E1</td>" in result._repr_html_() and "verdict met" in result._repr_html_()
