"""LATR: branch where the next token is uncertain, look ahead, drop branches that stay alike.

Rows decode window by window. At each token of a window whose runner-up is likely enough and near
enough to the likeliest, a child takes the runner-up and looks a window ahead; a child that stays
like its parent is dropped. What is missing at the end is sampled plainly.

Does not know how tokens are drawn. Source: LATR, released code starreeze/latr (constants); windows
with one pass over them, in place of its own decoding loop, are ours.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from tfgrpo.rl.strategies.growth import Ask, Branch, Leaf, Look, Root, TokenDistributions, draw_all
from tfgrpo.rl.strategy_options import LatrOptions
from tfgrpo.runtime.texts.edit_distance import edit_ratio


class Latr:
    """A `Growth` (see the module).

    Args:
        options: constants.
    """

    def __init__(self, options: LatrOptions) -> None:
        self._options = options

    def grow(self, root: Root) -> Generator[Ask, Any, list[Leaf]]:
        """Grow the tree, fill up with plain rows."""
        o = self._options
        most = max(1, round(o.share_at(root.step) * root.size))
        rows = [Branch(root.row_seed(0))]
        while len(rows) < most and any(self._may_branch(r) for r in rows):
            going = [r for r in rows if self._may_branch(r)]
            starts = [len(r.ids) for r in going]
            yield from draw_all(root, going, o.ahead)
            seen: list[TokenDistributions] = yield Look(
                tuple(tuple(r.ids) for r in going), tuple(starts)
            )
            children = self._children(root, going, starts, seen, most - len(rows), len(rows))
            yield from draw_all(root, [child for child, _, _ in children], o.ahead - 1)
            for child, parent, at in children:
                ahead = parent.ids[at : at + o.ahead]
                if edit_ratio(child.ids[at : at + len(ahead)], ahead) >= o.edit:
                    rows.append(child)
        yield from draw_all(root, rows)
        fresh = [Branch(root.row_seed(i)) for i in range(len(rows), root.size)]
        yield from draw_all(root, fresh)
        return [r.leaf() for r in (*rows, *fresh)]

    def _may_branch(self, row: Branch) -> bool:
        return not row.is_done and len(row.ids) < self._options.leave

    def _children(
        self,
        root: Root,
        rows: Sequence[Branch],
        starts: Sequence[int],
        seen: Sequence[TokenDistributions],
        room: int,
        known: int,
    ) -> list[tuple[Branch, Branch, int]]:
        """Children with their parent and the token that tells them apart, most uncertain first."""
        o = self._options
        found: list[tuple[float, int, Branch, int, TokenDistributions, int, int]] = []
        for parent, start, told in zip(rows, starts, seen, strict=True):
            for t in range(len(told.entropy_T)):
                place = start + t
                other = 1 if told.top_TK[t, 0] == parent.ids[place] else 0
                p = float(told.p_TK[t, other])
                gap = float(told.p_TK[t, 0]) - p
                if p > o.tau_abs and gap < o.tau_rel:
                    found.append((gap, len(found), parent, place, told, t, other))
        made: list[tuple[Branch, Branch, int]] = []
        for _, _, parent, place, told, t, other in sorted(found, key=lambda x: x[:2])[:room]:
            # seeds of rows that were dropped are used again: their tokens were too
            child = parent.fork(root.row_seed(root.size + known + len(made)), place)
            child.ids.append(int(told.top_TK[t, other]))
            child.logps.append(float(told.logp_TK[t, other]))
            child.is_cut = len(child.ids) >= root.limit
            child.is_done = child.is_cut or child.ids[-1] in root.eos_ids
            made.append((child, parent, place))
        return made
