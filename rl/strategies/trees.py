"""Trees of tokens, and values at cuts: groups whose segments can be given credit.

`TokenTree` forks every unfinished row into as many children a level; its leaves name their nodes.
`ValueChain` cuts plain rows at uncertain tokens and estimates the value of each cut by continuing
from it. Does not know estimators (`spo_tree`, `portool`, `branch_grpo` and `spo_chain` of the
registry read what the leaves hold).

Sources: SPO, released code AIFrameResearch/SPO (configuration level): trees of 6-6-6, cuts after
every fifth token of probability below 0.9, nine continuations a cut. BranchGRPO, abstract.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any

from tfgrpo.rl.strategies.growth import Ask, Branch, Draw, Judge, Leaf, Piece, Root, draw_all
from tfgrpo.rl.strategy_options import ChainOptions, TreeOptions


class TokenTree:
    """A `Growth` whose leaves are paths of one tree.

    A row that ends before its last level is one leaf; further rows from the root take the places of
    those that it leaves out.

    Args:
        options: shape.
    """

    def __init__(self, options: TreeOptions) -> None:
        self._options = options

    def grow(self, root: Root) -> Generator[Ask, Any, list[Leaf]]:
        """Grow level by level."""
        o, number = self._options, 0
        # a row, its cuts so far, and the names of the nodes that it passed
        open_rows = [(Branch(0), [0], ["root"])]
        done: list[tuple[Branch, list[int], list[str]]] = []
        for level, factor in enumerate(o.factors):
            is_last = level == len(o.factors) - 1
            children = []
            for row, cuts, names in open_rows:
                for k in range(factor):
                    child = row.fork(root.row_seed(number))
                    children.append((child, [*cuts], [*names, f"{names[-1]}.{k}"]))
                    number += 1
            most = None if is_last else o.segment
            yield from draw_all(root, [row for row, _, _ in children], most)
            for row, cuts, _ in children:
                cuts.append(len(row.ids))
            done += [x for x in children if x[0].is_done or is_last]
            open_rows = [x for x in children if not x[0].is_done and not is_last]
        fresh = [Branch(root.row_seed(number + i)) for i in range(root.size - len(done))]
        yield from draw_all(root, fresh)
        done += [(row, [0, len(row.ids)], ["root", f"fresh {i}"]) for i, row in enumerate(fresh)]
        return [
            row.leaf(
                segments=[b - a for a, b in pairwise(cuts)],
                state_keys=names[:-1],
            )
            for row, cuts, names in done
        ]


def uncertain_cuts(logps: Sequence[float], *, every: int, below: float) -> list[int]:
    """Return the lengths at which a row is cut: after every so many uncertain tokens.

    >>> uncertain_cuts([-1.0, -0.01, -1.0, -1.0, -1.0, -1.0], every=2, below=0.9)
    [3, 5]
    """
    places = [i + 1 for i, p in enumerate(logps) if math.exp(p) < below]
    cuts = places[every - 1 :: every]
    return [c for c in cuts if c < len(logps)]


class ValueChain:
    """A `Growth` of plain rows with the value of the prompt and of each cut.

    Args:
        options: cuts and draws.
    """

    def __init__(self, options: ChainOptions) -> None:
        self._options = options

    def grow(self, root: Root) -> Generator[Ask, Any, list[Leaf]]:
        """Draw the rows, then the continuations of every cut."""
        o = self._options
        rows = [Branch(root.row_seed(i)) for i in range(root.size)]
        yield from draw_all(root, rows)
        cuts = [uncertain_cuts(r.logps, every=o.every, below=o.below)[: o.most_cuts] for r in rows]
        prefixes: list[tuple[int, ...]] = [()]
        prefixes += [tuple(r.ids[:c]) for r, each in zip(rows, cuts, strict=True) for c in each]
        values = yield from self._values(root, prefixes)
        start, rest = values[0], iter(values[1:])
        leaves = []
        for row, each in zip(rows, cuts, strict=True):
            places = [0, *each, len(row.ids)]
            leaves.append(
                row.leaf(
                    segments=[b - a for a, b in pairwise(places)],
                    state_keys=[f"{i}" for i in range(len(each) + 1)],
                    step_rewards=[start, *(next(rest) for _ in each)],
                )
            )
        return leaves

    def _values(
        self, root: Root, prefixes: Sequence[tuple[int, ...]]
    ) -> Generator[Ask, Any, list[float]]:
        """Mean reward of the continuations of each prefix; what cannot be judged counts as the
        mean of the rest."""
        draws = self._options.draws
        pieces = [
            Piece(ids, root.row_seed(root.size + i * draws + j), root.limit - len(ids))
            for i, ids in enumerate(prefixes)
            for j in range(draws)
        ]
        made = yield Draw(tuple(pieces))
        whole = tuple(p.ids + g.token_ids for p, g in zip(pieces, made, strict=True))
        rewards: list[float | None] = yield Judge(whole)
        known = [r for r in rewards if r is not None]
        fallback = math.fsum(known) / len(known) if known else 0.0
        filled = [fallback if r is None else r for r in rewards]
        return [math.fsum(filled[i : i + draws]) / draws for i in range(0, len(filled), draws)]
