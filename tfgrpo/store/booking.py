"""What one model call may cost and what it did cost: the one place that books.

Pure functions over usage and prices, for every caller that spends: the journalled LM, the search's
reservations, a gateway. The order is always the same: `worst_case` before the call (reserve it),
then `book_replies` or `book_failure` (settle with `settlement`). A raw report of a provider is
made a `Usage` by `tfgrpo.lm.usage.normalise_usage`; whatever arrives here is checked again, since
an LM of a user's own writes its usage itself.

Does not know ledgers' files, journals, HTTP. Source: own; two-phase accounting as in `budget`.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.rollout import MOST_TOKENS, Usage
from tfgrpo.runtime.redaction import redact
from tfgrpo.store.budget import Ledger
from tfgrpo.store.calls import CallEnd
from tfgrpo.store.prices import Price, price_help

__all__ = [
    "ASSUMED_REPLY_TOKENS",
    "LearntBound",
    "MOST_USD",
    "WorstCase",
    "book_failure",
    "book_replies",
    "checked_usage",
    "require_price",
    "settlement",
    "with_cost",
    "worst_case",
]

ASSUMED_REPLY_TOKENS = 4096
"""Reply length of the worst case where the request sets no `max_tokens`."""
MOST_USD = 100_000.0
"""Largest cost of one call that is believed."""
_REJECTED = frozenset(
    {"auth", "not_found", "quota", "rate_limit", "overloaded", "context_too_long", "bad_request"}
)
_NEVER_CONNECTED = ("ConnectError", "ConnectTimeout", "ProxyError", "PoolTimeout")
_TOKEN_CLASSES = (
    "uncached_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "text_tokens",
    "reasoning_tokens",
)


@dataclass(frozen=True, slots=True)
class WorstCase:
    """The most that a call may use."""

    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None
    """None where the price is unknown."""
    calls: int = 1

    @property
    def amounts(self) -> dict[str, float]:
        """What to reserve: all that a model call uses; money where its price is known."""
        amounts: dict[str, float] = {
            "calls": self.calls,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.cost_usd is not None:
            amounts["cost_usd"] = self.cost_usd
        return amounts


def worst_case(
    prompt_tokens: int, max_tokens: int | None, n: int = 1, price: Price | None = None
) -> WorstCase:
    """Return the most that one call for n replies may use.

    Args:
        prompt_tokens: estimated size of the prompt.
        max_tokens: the request's limit of one reply; None assumes `ASSUMED_REPLY_TOKENS`, or the
            longest reply of the model where its price says one and it is shorter.
        price: dollars; None is unknown.

    >>> worst_case(1000, 50, 4, Price(input=1.0, output=10.0)).amounts["cost_usd"]
    0.003
    """
    if max_tokens is None:
        longest = price.max_output_tokens if price is not None else None
        max_tokens = min(ASSUMED_REPLY_TOKENS, longest or ASSUMED_REPLY_TOKENS)
    prompt = min(prompt_tokens, MOST_TOKENS)
    completion = min(max_tokens, MOST_TOKENS) * n
    cost = None if price is None else price.worst_usd(prompt, completion)
    return WorstCase(prompt, completion, cost)


def require_price(ledger: Ledger, price: Price | None, model_id: str) -> None:
    """Refuse a model of unknown price under a cap on money.

    Raises:
        ConfigError: the ledger, or one above it, limits money and the price is unknown.
    """
    if price is None and math.isfinite(ledger.remaining("cost_usd")):
        raise ConfigError(
            f"the budget limits money, but the price of {model_id!r} is unknown: "
            f"{price_help(model_id)}, or limit calls or tokens instead"
        )


def checked_usage(usage: Usage, prompt_tokens: int, completion_tokens: int) -> Usage:
    """Return the usage where it can be believed, else with estimates in place of absurd counts.

    Counts must be whole numbers from 0 to `MOST_TOKENS`, money a finite number from 0 to
    `MOST_USD`; a class that is not is replaced and the usage flagged as estimated.

    Args:
        prompt_tokens: estimate of the prompt, in place of its absurd classes.
        completion_tokens: estimate of the reply, in place of its absurd classes.

    >>> checked_usage(Usage(uncached_tokens=2**64 - 1, text_tokens=3, calls=1), 12, 5)
    Usage(uncached_tokens=12, cache_read_tokens=0, cache_write_tokens=0, text_tokens=3, \
reasoning_tokens=0, calls=1, cost_usd=0.0, is_estimated=True)
    """
    counts = {name: _count(getattr(usage, name)) for name in _TOKEN_CLASSES}
    calls, cost = _count(usage.calls, most=1000), _money(usage.cost_usd)
    is_sure = None not in counts.values() and calls is not None and cost == usage.cost_usd
    if is_sure:
        return usage
    instead = {"uncached_tokens": prompt_tokens, "text_tokens": completion_tokens}
    return Usage(
        **{n: instead.get(n, 0) if c is None else c for n, c in counts.items()},
        calls=1 if calls is None else calls,
        cost_usd=cost,
        is_estimated=True,
    )


def _count(value: Any, most: int = MOST_TOKENS) -> int | None:
    try:
        number = index(value)
    except TypeError:
        return None
    return number if 0 <= number <= most and type(value) is not bool else None


def _money(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if 0 <= value <= MOST_USD else None


def with_cost(usage: Usage, price: Price | None) -> Usage:
    """Return the usage with its cost: by the price, or as reported; None where neither says it."""
    cost = (usage.cost_usd or None) if price is None else price.cost_usd(usage)
    return usage if cost == usage.cost_usd else replace(usage, cost_usd=cost)


def book_replies(
    usages: Sequence[Usage], *, duration_s: float, model: str, extra_calls: int = 0
) -> CallEnd:
    """Return the end of a call that was answered; `usages` are its replies' shares."""
    total = sum(usages[1:], usages[0])
    calls = max(total.calls, 1 + extra_calls)
    if calls != total.calls:
        total = replace(total, calls=calls)
    return CallEnd("ok", total, duration_s, len(usages), model)


def book_failure(
    failure: ProviderError, *, duration_s: float, price: Price | None, extra_calls: int = 0
) -> CallEnd:
    """Return the end of a call that failed, by what it can have cost.

    Never connected: nothing. Refused before a word was generated: the call. Broken off with a
    report of what was used: that. Anything else (time-outs, lost connections, an error after
    text): unknown, so it counts at its worst case.
    """
    sent = 1 + extra_calls
    if _never_connected(failure):
        kind, usage = (
            ("rejected", Usage(calls=extra_calls)) if extra_calls else ("not_sent", Usage())
        )
    elif isinstance(failure.spent, Usage):
        spent = checked_usage(failure.spent, 0, 0)
        if spent.is_estimated or not spent.total_tokens:
            kind, usage = "unsettled", Usage()
        else:
            kind, usage = "rejected", with_cost(replace(spent, calls=sent), price)
    elif failure.had_output:
        kind, usage = "unsettled", Usage()
    elif failure.kind in _REJECTED or (failure.kind == "refused" and failure.status is not None):
        kind, usage = "rejected", Usage(calls=sent)
    else:
        kind, usage = "unsettled", Usage()
    return CallEnd(kind, usage, duration_s, failure=failure.kind, error=redact(str(failure))[:1000])


def settlement(end: CallEnd, held: Mapping[str, float]) -> dict[str, float]:
    """Return what a call spends of its reservation; nothing named means all that was held."""
    if end.kind == "unsettled":
        return {}
    usage = end.usage
    spent: dict[str, float] = {
        "calls": usage.calls,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    if usage.cost_usd is not None:
        spent["cost_usd"] = usage.cost_usd
    elif "cost_usd" in held:
        spent["cost_usd"] = held["cost_usd"] if end.kind == "ok" else 0.0
    return spent


class LearntBound:
    """Makes worst cases as large as real usage has been.

    Prompts are estimated from bytes, and servers may pass `max_tokens`; where a call used more
    than its worst case, later worst cases grow by that factor, so a cap is passed by no more than
    the calls then in flight.
    """

    def __init__(self) -> None:
        self.prompt = 1.0
        """Factor on estimated prompt tokens, at least 1."""
        self.completion = 1.0
        """Factor on the reply's limit, at least 1."""

    def widen(self, prompt_tokens: int, completion_tokens: int) -> tuple[int, int]:
        """Return estimates with the factors applied."""
        return math.ceil(prompt_tokens * self.prompt), math.ceil(
            completion_tokens * self.completion
        )

    def observe(self, estimate: tuple[int, int], usage: Usage) -> bool:
        """Take what a call with this (unwidened) estimate used; True when a factor grew."""
        prompt = usage.prompt_tokens / max(1, estimate[0])
        completion = usage.completion_tokens / max(1, estimate[1])
        grew = prompt > self.prompt or completion > self.completion
        self.prompt, self.completion = max(self.prompt, prompt), max(self.completion, completion)
        return grew


def _never_connected(failure: ProviderError) -> bool:
    """Tell whether a failure is one before any byte of the request was sent."""
    if failure.was_sent is not None:
        return not failure.was_sent
    cause: BaseException | None = failure
    for _ in range(8):
        if cause is None:
            return False
        if isinstance(cause, (ConnectionRefusedError, socket.gaierror)):
            return True
        if type(cause).__name__ in _NEVER_CONNECTED:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
