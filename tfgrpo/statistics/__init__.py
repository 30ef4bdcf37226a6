"""Paired comparisons clustered by task, pass@k, noise floors and what a run could detect.

Three files: `intervals` (means, paired differences, learning seeds), `at_k` (pass@k, max@k) and
`planning` (noise floor, smallest detectable effect, error spent by the gate). numpy and scipy
only. Does not know groups or files.
"""

from tfgrpo.statistics.at_k import max_at_k, pass_at_k, pass_at_k_interval
from tfgrpo.statistics.intervals import (
    Interval,
    Scores,
    level_words,
    lower_bound,
    mean_interval,
    paired_difference,
    permutation_p,
    seeds_difference,
)
from tfgrpo.statistics.planning import (
    NoiseFloor,
    choice_level,
    gate_level,
    min_detectable,
    noise_floor,
    tasks_needed,
)

__all__ = [
    "Interval",
    "NoiseFloor",
    "Scores",
    "choice_level",
    "gate_level",
    "level_words",
    "lower_bound",
    "max_at_k",
    "mean_interval",
    "min_detectable",
    "noise_floor",
    "paired_difference",
    "pass_at_k",
    "pass_at_k_interval",
    "permutation_p",
    "seeds_difference",
    "tasks_needed",
]
