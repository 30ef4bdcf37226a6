"""BREAD: the shortest expert prefix from which something succeeds, found by bisection.

Where all of a task's own rollouts fail, prefixes of an expert's solution are tried; rollouts then
branch from the shortest that works. An immutable search over prefix numbers; does not know texts
or how a prefix is forced.

Source: BREAD (arXiv 2506.17211), second hand. Approximation: bisection assumes that a longer
prefix is no harder; where chance breaks that, the result works but may not be the shortest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfgrpo.errors import ConfigError
from tfgrpo.rl.hints.plan import HintPlan


@dataclass(frozen=True, slots=True)
class PrefixSearch:
    """Bisection over prefixes 1 … `n_prefixes`; the bare task (0) is known to fail.

    >>> search = PrefixSearch(4)
    >>> while (k := search.next()) is not None:
    ...     search = search.told(k, succeeded=k >= 3)
    >>> search.found, search.tries
    (3, 2)
    """

    n_prefixes: int
    fails: int = 0
    """Longest prefix known to fail."""
    works: int | None = None
    """Shortest prefix known to work."""
    tries: int = 0

    def next(self) -> int | None:
        """Return the prefix to try, or None when the search is over."""
        top = self.n_prefixes + 1 if self.works is None else self.works
        return (self.fails + top) // 2 if top - self.fails > 1 else None

    def told(self, prefix: int, *, succeeded: bool) -> PrefixSearch:
        """Return the search after a try.

        Raises:
            ConfigError: the prefix is not the one that `next` named.
        """
        if prefix != self.next():
            raise ConfigError(f"prefix {prefix} was tried; the search asked for {self.next()}")
        if succeeded:
            return replace(self, works=prefix, tries=self.tries + 1)
        return replace(self, fails=prefix, tries=self.tries + 1)

    @property
    def found(self) -> int | None:
        """The shortest prefix that worked, once the search is over; None where none did."""
        return self.works if self.next() is None else None


def branch_plan(steps: Sequence[str], prefix: int, *, group_key: str, n: int) -> HintPlan:
    """Return the plan that branches n rollouts after the first `prefix` steps of an expert.

    The expert's steps are not trained on; log-probs of what follows stand under the original
    prompt and the prefix.

    Raises:
        ConfigError: `prefix` is not in 1 … len(steps) − 1: the whole solution is never given.
    """
    if not 1 <= prefix < len(steps):
        raise ConfigError(
            f"prefix {prefix} of {len(steps)} steps: give 1 to {len(steps) - 1}; the whole "
            "solution would leave nothing to learn"
        )
    return HintPlan(
        response_prefix="".join(steps[:prefix]),
        n=n,
        level=prefix,
        source="oracle",
        group_key=group_key,
        condition="original",
    )
