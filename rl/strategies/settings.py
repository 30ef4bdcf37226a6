"""Builds the strategy that `rollout.strategy` names.

Does not know how a strategy works. Source: own.
"""

from __future__ import annotations

from tfgrpo.protocols import HintScheduler
from tfgrpo.rl.rollouts.single_turn import SingleTurnMaker
from tfgrpo.rl.strategies.echo import Echo
from tfgrpo.rl.strategies.growth import Growth
from tfgrpo.rl.strategies.latr import Latr
from tfgrpo.rl.strategies.maker import GrowingMaker, Sight
from tfgrpo.rl.strategies.partial import PartialRolls
from tfgrpo.rl.strategies.trees import TokenTree, ValueChain
from tfgrpo.rl.strategies.turn_trees import Arpo, TurnTree
from tfgrpo.rl.strategy_options import (
    ArpoOptions,
    ChainOptions,
    EchoOptions,
    LatrOptions,
    Options,
    PartialOptions,
    TreeOptions,
    TurnTreeOptions,
    refuse_beside,
)


def growth_of(options: Options | None) -> Growth | None:
    """Return what grows groups of one turn, or None for other strategies."""
    match options:
        case LatrOptions():
            return Latr(options)
        case TreeOptions():
            return TokenTree(options)
        case ChainOptions():
            return ValueChain(options)
        case EchoOptions():
            return Echo(options)
        case _:
            return None


def makers_of(
    options: Options | None, plain: object, sight: Sight, *, is_foreign: bool
) -> tuple[GrowingMaker | None, PartialRolls | None]:
    """Return what makes groups of one turn otherwise than each rollout alone, and what keeps them
    in flight; None each where the strategy does not.

    Args:
        options: of the strategy.
        plain: the trainer's maker; strategies of one turn need one of single turns.
        sight: how distributions are looked at.
        is_foreign: the maker's generator is not the trainer's own, which alone can stop a row.
    """
    if not isinstance(plain, SingleTurnMaker):
        return None, None
    if isinstance(options, PartialOptions):
        refuse_beside("rollout.strategy 'april'", {"a generator of your own": is_foreign})
        return None, PartialRolls(plain, options)
    growth = growth_of(options)
    return (None if growth is None else GrowingMaker(plain, growth, sight)), None


def turns_of(options: Options | None, vocabulary: int, seed: int) -> HintScheduler | None:
    """Return what branches rollouts of several turns, or None for other strategies."""
    match options:
        case ArpoOptions():
            return Arpo(options, vocabulary, seed)
        case TurnTreeOptions():
            return TurnTree(options)
        case _:
            return None
