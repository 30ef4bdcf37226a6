"""`graph`: a heuristic is checked against exact costs."""

from tfgrpo.search.graph import check_heuristic

STEPS = {"start": [("a", "left", 1.0), ("b", "right", 3.0)], "right": [("c", "goal", 1.0)]}
report = check_heuristic(
    "start", lambda s: STEPS.get(s, []), lambda s: 2.0, is_goal=lambda s: s == "goal"
)
assert report.optimum == 4.0, report
assert ("right", 2.0, 1.0) in report.not_admissible, report
