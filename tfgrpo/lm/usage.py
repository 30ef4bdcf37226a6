"""Providers' usage reports, normalised to disjoint token classes.

Two shapes exist in the field. *Inside*: `prompt_tokens` counts cached tokens, and details say how
many (OpenAI, vLLM). *Beside*: `input_tokens` is only what was not cached, and cache reads and
writes stand next to it (Anthropic). Reading one as the other bills a token twice or four times
(BerriAI/litellm#9812, #14849). A report that fits neither, or no report, is estimated and flagged.

Does not know prices. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.rollout import MOST_TOKENS, Usage
from tfgrpo.runtime.token_estimates import quarter_of

Unseen = tuple[int, int]
"""Tokens of the prompt and of the replies that a report may count beyond one for each byte."""

ANY_UNSEEN: Unseen = (2_000_000, 2_000_000)
"""Where the prompt may lie elsewhere: files and conversations that the provider keeps."""


def unseen_in(max_tokens: int | None, n: int = 1) -> Unseen:
    """Return what a report may count beside a prompt and replies of text that are known whole.

    Servers add templates, instructions and tools to a prompt, a few ten thousand tokens at most,
    and hidden reasoning to a reply, up to `max_tokens` where that is set.

    >>> unseen_in(100), unseen_in(None)
    ((262144, 131472), (262144, 2000000))
    """
    return 262_144, ANY_UNSEEN[1] if max_tokens is None else 131_072 + 4 * max_tokens * n


def normalise_usage(
    report: Any,
    *,
    prompt_chars: int = 0,
    reply_chars: int = 0,
    calls: int = 1,
    unseen: Unseen = ANY_UNSEEN,
) -> Usage:
    """Return the usage of one call; `cost_usd` is unknown (None).

    Args:
        report: the provider's `usage` object, whatever it is.
        prompt_chars: UTF-8 bytes of the prompt, for the estimate (bytes / 4).
        reply_chars: UTF-8 bytes of all replies, for the estimate.
        calls: how many requests the report covers.
        unseen: what may be counted beside those bytes; a higher count is not believed.

    >>> normalise_usage({"prompt_tokens": 12, "completion_tokens": 3}).uncached_tokens
    12
    >>> normalise_usage({"input_tokens": 3, "cache_creation_input_tokens": 12304,
    ...                  "cache_read_input_tokens": 0, "output_tokens": 550}).prompt_tokens
    12307
    """
    row = report if isinstance(report, Mapping) else {}
    most = prompt_chars + calls * unseen[0], reply_chars + calls * unseen[1]
    row, is_absurd = _believable(row, most)
    prompt, prompt_sure = _prompt_classes(row, prompt_chars)
    completion, completion_sure = _completion_classes(row, reply_chars)
    sure = prompt_sure and completion_sure and _total_fits(row, sum(prompt), sum(completion))
    sure = sure and not is_absurd
    return Usage(*prompt, *completion, calls=calls, cost_usd=None, is_estimated=not sure)


_PROMPT_COUNTS = frozenset(
    ["prompt_tokens", "input_tokens", "cached_tokens", "cache_read_tokens", "cache_write_tokens",
     "cache_creation_tokens", "cache_read_input_tokens", "cache_creation_input_tokens",
     "prompt_cache_hit_tokens"]
)  # fmt: skip
_COMPLETION_COUNTS = frozenset(["completion_tokens", "output_tokens", "reasoning_tokens"])
_DETAILS = (
    "prompt_tokens_details",
    "input_tokens_details",
    "completion_tokens_details",
    "output_tokens_details",
)


def _believable(
    row: Mapping[str, Any], most: tuple[int, int], inner: tuple[str, ...] = _DETAILS
) -> tuple[dict[str, Any], bool]:
    """Return a report without the counts that cannot be, and whether there was one: negative,
    broken, or more than the call can have used."""
    kept: dict[str, Any] = {}
    is_absurd = False
    for name, value in row.items():
        if name in inner and isinstance(value, Mapping):
            value, is_worse = _believable(value, most, ())
            is_absurd |= is_worse
        elif value is not None and (limit := _limit(name, most)) is not None:
            count = _count(row, name)
            if count is None or count > limit:
                is_absurd = True
                continue
        kept[name] = value
    return kept, is_absurd


def _limit(name: str, most: tuple[int, int]) -> int | None:
    if name in _PROMPT_COUNTS:
        return most[0]
    if name in _COMPLETION_COUNTS:
        return most[1]
    return sum(most) if name == "total_tokens" else None


def _count(row: Any, *names: str) -> int | None:
    """The first of the named fields that is a whole number from 0 to `MOST_TOKENS`."""
    if not isinstance(row, Mapping):
        return None
    for name in names:
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if 0 <= value <= MOST_TOKENS and value == int(value):  # False for NaN and infinities
            return int(value)
    return None


def _prompt_classes(row: Mapping[str, Any], chars: int) -> tuple[tuple[int, int, int], bool]:
    """(uncached, cache read, cache write) and whether the report was consistent."""
    details = row.get("prompt_tokens_details") or row.get("input_tokens_details")
    beside_read = _count(row, "cache_read_input_tokens")
    beside_write = _count(row, "cache_creation_input_tokens")
    total = _count(row, "prompt_tokens")
    plain = _count(row, "input_tokens")
    inside_read = _count(details, "cached_tokens", "cache_read_tokens")
    if inside_read is None:
        inside_read = _count(row, "prompt_cache_hit_tokens", "cached_tokens")
    inside_write = _count(details, "cache_write_tokens", "cache_creation_tokens") or 0
    if (
        total is None
        and plain is not None
        and (beside_read is not None or beside_write is not None)
    ):
        return (plain, beside_read or 0, beside_write or 0), True
    given = total if total is not None else plain
    read = inside_read if inside_read is not None else (beside_read or 0)
    write = max(inside_write, beside_write or 0)
    if not given:  # absent, zero or negative: a prompt is never empty
        return (max(1, quarter_of(chars)), 0, 0) if chars else (0, 0, 0), False
    if read + write > given:
        # Fits neither style as labelled: the parts exceed the total, so they must lie beside it.
        # The higher reading counts against a cap, and the flag says that it is uncertain.
        return (given, read, write), False
    return (given - read - write, read, write), True


def _completion_classes(row: Mapping[str, Any], chars: int) -> tuple[tuple[int, int], bool]:
    """(text, reasoning) and whether the report was consistent."""
    details = row.get("completion_tokens_details") or row.get("output_tokens_details")
    reasoning = _count(details, "reasoning_tokens") or 0
    total = _count(row, "completion_tokens", "output_tokens")
    if total is None or (total == 0 and chars > 0):
        return (quarter_of(chars), reasoning), False
    if reasoning > total:
        return (total, reasoning), False
    return (total - reasoning, reasoning), True


def _total_fits(row: Mapping[str, Any], prompt: int, completion: int) -> bool:
    total = row.get("total_tokens")
    if total is None:
        return True
    counted = _count(row, "total_tokens")
    # litellm and some gateways leave cache tokens out of the total: accept no other difference.
    return counted is not None and counted in {
        prompt + completion,
        (_count(row, "prompt_tokens", "input_tokens") or 0) + completion,
    }


def share_usage(usage: Usage, weights: Sequence[int]) -> list[Usage]:
    """Split one call's usage over its replies; the shares sum to the whole, class by class.

    Prompt classes and the call itself go to the first reply (the prompt was read once); completion
    classes go by `weights` (token or byte counts of the replies), remainders to the first.

    >>> [u.text_tokens for u in share_usage(Usage(uncached_tokens=9, text_tokens=10), [1, 3])]
    [3, 7]
    """
    n = len(weights)
    total = sum(weights) or n
    parts = [w if sum(weights) else 1 for w in weights]
    texts = _split(usage.text_tokens, parts, total)
    thoughts = _split(usage.reasoning_tokens, parts, total)
    shares = []
    for i in range(n):
        first = i == 0
        shares.append(
            Usage(
                usage.uncached_tokens if first else 0,
                usage.cache_read_tokens if first else 0,
                usage.cache_write_tokens if first else 0,
                texts[i],
                thoughts[i],
                usage.calls if first else 0,
                usage.cost_usd if first or usage.cost_usd is None else 0.0,
                usage.is_estimated,
            )
        )
    return shares


def _split(amount: int, parts: Sequence[int], total: int) -> list[int]:
    shares = [amount * p // total for p in parts]
    shares[0] += amount - sum(shares)
    return shares
