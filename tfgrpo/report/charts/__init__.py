"""The pages' charts: plain rows of a summary in, one `<svg>` element as text out."""

from tfgrpo.report.charts.axes import are_possible
from tfgrpo.report.charts.benefit import (
    before_and_after,
    categories,
    cost_and_reward,
    intervals,
    tasks,
)
from tfgrpo.report.charts.routing import cost_and_quality
from tfgrpo.report.charts.steps import curve, growth, informative, reward_by_tokens, spend
from tfgrpo.report.charts.training import lines

__all__ = [
    "are_possible",
    "before_and_after",
    "categories",
    "cost_and_quality",
    "cost_and_reward",
    "curve",
    "growth",
    "informative",
    "intervals",
    "lines",
    "reward_by_tokens",
    "spend",
    "tasks",
]
