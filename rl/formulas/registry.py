"""Named pure functions with their provenance: losses, aggregations, advantages, rewards, credit.

A registry is a plain dictionary; `register` is the only way in and refuses an entry that lacks
a source, a formula, a certainty or the test that proves it. Does not know what the functions
compute. Idea: one registry for the variants that elsewhere live in forks (own).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, NotRequired, TypedDict, TypeVar, Unpack, get_args

from tfgrpo.errors import ConfigError

Certainty = Literal["code", "paper", "approximation", "own"]
"""Where the formula was read: released code, the paper's text, our reading of an abstract; or it is
a rule of our own that claims nobody's name."""

NEEDS = (
    "sequence",
    "group",
    "every_row",
    "entropy",
    "reference",
    "behaviour",
    "next_gap",
    "ratio",
    "own_start",
    "rewards",
    "given",
    "verdicts",
    "half_step",
    "passes",
    "width",
    "parts",
    "logp",
    "logp_tokens",
    "entropy_tokens",
    "token_ids",
    "steps",
    "states",
    "step_rewards",
    "answers",
    "baseline",
    "extra",
)
"""What an entry may ask for. A loss: `sequence` (a token's loss depends on its whole row),
`group` (on its whole group), `every_row` (a row of advantage 0 still has a gradient), `entropy`,
`reference` (log-probs of a reference), `behaviour` (the engine's own log-probs), `next_gap` (see
`losses.regression.rover`), `ratio` (its gradient depends on log π_old, so that old rollouts may be
used, and one update per batch leaves the ratio at 1), `own_start` (with the ratio at 1 its gradient
is still its own, not that of `reinforce`), `rewards` (it goes by rewards or verdicts, and
advantages have no effect), `given` (each group has its task's reference as a further row, see
`update.given_rows`), `verdicts` (parts `beats_J` of the score, a row's verdict against each
sibling), `half_step` (see `losses.groups.nash_mp`), `passes` (a batch is used more than once, and
its rows carry facts from pass to pass); it may use `width` (it widens its clip by
`TokenBatch.columns["width"]`). A loss with `columns`, an advantage, a reward or a credit: the
optional fields of `RewardBatch`, and `extra:NAME` for a column of `RewardBatch.extra`."""


AfterStep = Callable[[Mapping[str, float], Any, Mapping[str, Any]], dict[str, float]]
"""(state, what the step saw, options) to the next step's state. A step sees the `RewardBatch` for
an advantage, a reward or a credit, and `RatioFacts` for a loss."""
Columns = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
"""(`RewardBatch`, options) to further facts a token (D) that the loss is given by name, see
`TokenBatch.columns`."""
Carry = Callable[..., Mapping[str, Any]]
"""(`TokenBatch`, the loss's options) to what each row carries to the next pass over its batch, by
column: R."""


class FormulaSource(TypedDict):
    """Where an entry's formula comes from and what proves it."""

    source: str
    formula: str
    certainty: Certainty
    test: str
    checked: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Entry:
    """One named function."""

    name: str
    fn: Callable[..., Any]
    source: str
    """Paper or repository, with section or file."""
    formula: str
    """The rule in one line of plain text."""
    certainty: Certainty
    test: str
    """`path::test_name` of the closed-form test."""
    checked: str = ""
    """What the function was compared with, and what differs."""
    needs: tuple[str, ...] = ()
    """What the trainer must supply or do, see `NEEDS`."""
    uses: tuple[str, ...] = ()
    """Needs that it takes where they are there and does without elsewhere."""
    aggregation: str = ""
    """The aggregation that its paper or release uses, taken where none is set."""
    after_step: AfterStep | None = None
    """For a function with state between steps, which it gets as options."""
    columns: Columns | None = None
    """For a loss, or a credit that says more to the loss than advantages."""
    carry: Carry | None = None
    """For a loss whose rows keep facts from pass to pass; it gets them as `TokenBatch.columns`."""

    @property
    def is_approximation(self) -> bool:
        """True when the formula is our reading of an abstract or a summary."""
        return self.certainty == "approximation"


Fn = TypeVar("Fn", bound=Callable[..., Any])


def register(
    registry: dict[str, Entry],
    name: str,
    *,
    needs: tuple[str, ...] = (),
    uses: tuple[str, ...] = (),
    aggregation: str = "",
    after_step: AfterStep | None = None,
    columns: Columns | None = None,
    carry: Carry | None = None,
    **texts: Unpack[FormulaSource],
) -> Callable[[Fn], Fn]:
    """Return a decorator that files a function in `registry` under `name`.

    Raises:
        ValueError: the name is taken, a text is empty, or a certainty or need is unknown.
    """
    if name in registry:
        raise ValueError(f"{name!r} is registered twice")
    for field in ("source", "formula", "test"):
        if not str(texts.get(field, "")).strip():
            raise ValueError(f"entry {name!r} has no {field}")
    if "::" not in texts["test"]:
        raise ValueError(f"entry {name!r}: test {texts['test']!r} must read 'path::test_name'")
    if texts["certainty"] not in get_args(Certainty):
        raise ValueError(f"entry {name!r}: certainty {texts['certainty']!r} is none of {Certainty}")
    unknown = sorted(n for n in (*needs, *uses) if n.partition(":")[0] not in NEEDS)
    if unknown:
        raise ValueError(f"entry {name!r} needs {unknown}; known are {NEEDS}")

    def keep(fn: Fn) -> Fn:
        registry[name] = Entry(
            name=name,
            fn=fn,
            needs=needs,
            uses=uses,
            aggregation=aggregation,
            after_step=after_step,
            columns=columns,
            carry=carry,
            **texts,
        )
        return fn

    return keep


def merged(*families: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return one registry of several families; a name may occur once.

    Raises:
        ValueError: two families file the same name.
    """
    whole: dict[str, Entry] = {}
    for family in families:
        for name, entry in family.items():
            if name in whole:
                raise ValueError(f"{name!r} is registered twice")
            whole[name] = entry
    return whole


def lookup(registry: Mapping[str, Entry], kind: str, name: str) -> Entry:
    """Return an entry; a wrong name is a `ConfigError` that suggests the nearest."""
    if name in registry:
        return registry[name]
    near = get_close_matches(name, registry, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"no {kind} {name!r}{hint} Known: {', '.join(sorted(registry))}")


def check_needs(
    entry: Entry,
    kind: str,
    supplied: Collection[str],
    advice: Callable[[str], str] = lambda need: "call it from your own loop",
) -> None:
    """Refuse an entry that asks for what the caller does not supply, before anything is sampled.

    Args:
        entry: what is about to be used.
        kind: what it is, for the message.
        supplied: needs that are met.
        advice: a need to what may be done about it.

    Raises:
        ConfigError: a need is not among `supplied`.
    """
    missing = [need for need in entry.needs if need not in supplied]
    if missing:
        what = "; ".join(dict.fromkeys(advice(need) for need in missing))
        raise ConfigError(
            f"{kind} {entry.name!r} needs {', '.join(missing)}, which is not supplied here: "
            f"{what}, or choose another {kind}"
        )


def check_options(
    entry: Entry, kind: str, given: Mapping[str, Any], filled: Collection[str] = ()
) -> None:
    """Refuse options that an entry does not have, and name those that it cannot do without.

    Args:
        entry: what is about to be used.
        kind: what it is, for the message.
        given: the options.
        filled: options that the caller fills in where they are not given.

    Raises:
        ConfigError: an unknown option, with the nearest known one, or a missing one.
    """
    parameters = inspect.signature(entry.fn).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and not p.name.endswith("_D")]
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in given:
        if name not in known and not (is_open and name.startswith("weight_")):
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
            raise ConfigError(f"{kind} {entry.name!r} has no option {name!r}; {hint}")
    for p in parameters:
        if p.name in given and isinstance(given[p.name], str) != isinstance(p.default, str):
            wanted = "a word" if isinstance(p.default, str) else "a number"
            raise ConfigError(
                f"{kind} {entry.name!r}: option {p.name!r} is {given[p.name]!r}; give {wanted}"
            )
    bare = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    missing = [n for n in bare if n not in given and n not in filled]
    if missing:
        raise ConfigError(f"{kind} {entry.name!r} needs the option {', '.join(missing)}")


T = TypeVar("T")


def required(value: T | None, entry: str, field: str, advice: str = "") -> T:
    """Return an optional input that an entry cannot do without.

    Raises:
        ConfigError: it is absent.
    """
    if value is None:
        raise ConfigError(f"{entry!r} needs {field}, which was not given{advice and '; '}{advice}")
    return value


ABOVE_0 = math.ulp(0.0)
"""The least number above 0."""


def within(entry: str, **options: tuple[float, float, float]) -> None:
    """Check options of an entry, each given as (value, least, most).

    Raises:
        ConfigError: a value is out of its range, or not a number.
    """
    for name, (value, least, most) in options.items():
        if not least <= value <= most:
            low = "above 0" if least == ABOVE_0 else f"{least:g} or more"
            high = "" if most == math.inf else f" and {most:g} or less"
            raise ConfigError(f"{entry!r}: {name} is {value:g} and must be {low}{high}")
