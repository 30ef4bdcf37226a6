"""The registry of policy losses: pure functions of a `TokenBatch`, one value a token.

Aggregation to one number is a separate choice (`aggregations.py`), and so are KL to a reference
and entropy terms (`update.py`). One family a file: clipped ratios, whole rows, score functions,
regressions, spans, pairs, groups. Does not know how any of them works.
"""

from __future__ import annotations

from tfgrpo.rl.formulas.losses.clip import CLIP_LOSSES
from tfgrpo.rl.formulas.losses.groups import GROUP_LOSSES
from tfgrpo.rl.formulas.losses.pairs import PAIR_LOSSES
from tfgrpo.rl.formulas.losses.regression import REGRESSION_LOSSES
from tfgrpo.rl.formulas.losses.score import SCORE_LOSSES
from tfgrpo.rl.formulas.losses.sequence import SEQUENCE_LOSSES
from tfgrpo.rl.formulas.losses.spans import SPAN_LOSSES
from tfgrpo.rl.formulas.registry import Entry, merged

__all__ = ["LOSSES"]

LOSSES: dict[str, Entry] = merged(
    CLIP_LOSSES,
    SEQUENCE_LOSSES,
    SPAN_LOSSES,
    SCORE_LOSSES,
    REGRESSION_LOSSES,
    PAIR_LOSSES,
    GROUP_LOSSES,
)
