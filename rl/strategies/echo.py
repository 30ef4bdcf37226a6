"""ECHO: rows fork where they are uncertain, less the surer the group is, and unsure rows are ended.

Every window each row is looked at: its width grows with the window's entropy and shrinks with the
group's confidence; a row whose own confidence stays under a floor for several windows is ended, and
its place is drawn anew. Meant for rewards by majority, which need no reference.

Does not know how tokens are drawn. Source: ECHO (entropy-confidence hybrid), abstract:
approximation throughout; the formulas are not public.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfgrpo.rl.strategies.growth import Ask, Branch, Leaf, Look, Root, TokenDistributions, draw_all
from tfgrpo.rl.strategy_options import EchoOptions


def width_of(entropy: float, confidence: float, options: EchoOptions) -> int:
    """Return how many rows go on from one, itself included.

    >>> width_of(1.0, 0.0, EchoOptions()), width_of(1.0, 1.0, EchoOptions())
    (3, 1)
    """
    share = min(1.0, entropy / options.reference) * (1 - confidence)
    return 1 + round((options.most_width - 1) * share)


@dataclass(slots=True)
class _Row:
    branch: Branch
    unsure: int = 0
    """Looks in a row at which it was unsure."""


class Echo:
    """A `Growth` (see the module).

    Args:
        options: constants.
    """

    def __init__(self, options: EchoOptions) -> None:
        self._options = options

    def grow(self, root: Root) -> Generator[Ask, Any, list[Leaf]]:
        """Grow window by window, fill up with plain rows."""
        o = self._options
        number = min(o.first, root.size)
        rows = [_Row(Branch(root.row_seed(i))) for i in range(number)]
        while going := [r for r in rows if not r.branch.is_done]:
            starts = tuple(len(r.branch.ids) for r in going)
            yield from draw_all(root, [r.branch for r in going], o.window)
            ids = tuple(tuple(r.branch.ids) for r in going)
            seen: list[TokenDistributions] = yield Look(ids, starts, 1)
            sure = [_confidence(r.branch, start) for r, start in zip(going, starts, strict=True)]
            group = math.fsum(sure) / len(sure)
            for row, own in zip(going, sure, strict=True):
                row.unsure = row.unsure + 1 if own < o.floor else 0
            # at least one row stays; one that was ended never comes back
            ended = [r for r in going if r.unsure >= o.checks and not r.branch.is_done]
            ended = ended[: max(0, len(rows) - 1)]
            rows = [r for r in rows if all(r is not e for e in ended)]
            widths = [
                (r, width_of(float(np.mean(s.entropy_T)) if len(s.entropy_T) else 0.0, group, o))
                for r, s in zip(going, seen, strict=True)
                if not r.branch.is_done and all(r is not e for e in ended)
            ]
            # spread over the rows: one child each, then the next
            for extra in range(1, o.most_width):
                for row, width in widths:
                    if width > extra and len(rows) < root.size:
                        rows.append(_Row(row.branch.fork(root.row_seed(number))))
                        number += 1
        fresh = [Branch(root.row_seed(number + i)) for i in range(root.size - len(rows))]
        yield from draw_all(root, fresh)
        return [b.leaf() for b in (*(r.branch for r in rows), *fresh)]


def _confidence(row: Branch, start: int) -> float:
    """Mean probability of the tokens from `start` on; 1 where there are none."""
    part = row.logps[start:]
    return math.fsum(map(math.exp, part)) / len(part) if part else 1.0
