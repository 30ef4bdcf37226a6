"""The `[hints]` section of a training run, checked and made into a scheduler.

Does not know how schedulers work. Source: own.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field, ValidationError

from tfgrpo.config.sections import explain
from tfgrpo.errors import ConfigError
from tfgrpo.hints.adhint import AdHint, PrefixShare
from tfgrpo.hints.bread import Bread
from tfgrpo.hints.pope import Pope
from tfgrpo.hints.questa import Questa
from tfgrpo.hints.rewriting import Rewriter
from tfgrpo.hints.sage import Sage, SageLight
from tfgrpo.hints.scaf import Scaf
from tfgrpo.hints.second_tries.contexts import Icpo
from tfgrpo.hints.second_tries.sections import SECTIONS
from tfgrpo.hints.sections import Common, Levels, Recorded, WriterKeys
from tfgrpo.hints.stephint import StepHint
from tfgrpo.protocols import HintScheduler
from tfgrpo.rollout import Task


class _Sage(WriterKeys):
    restart: bool = True
    ahead: bool = False
    rewrite: Literal["never", "visit"] = "never"
    """`visit` has the policy write the hints anew once a visit's first level has failed."""

    def make(self) -> Recorded:
        """Build the scheduler.

        Raises:
            ConfigError: `rewrite` with a teacher, or with `ahead`.
        """
        plans, rewriter = self.plans(), None
        if self.rewrite == "visit":
            if self.writer not in ("given", "self"):
                raise ConfigError(
                    f"hints.rewrite = 'visit' has the policy write, and hints.writer is "
                    f"{self.writer!r}: leave one of them out"
                )
            rewriter = Rewriter(
                plans,
                retries=self.retries,
                max_tokens=self.writer_tokens,
                solution_key=self.solution_key,
            )
        return Sage(
            plans,
            max_level=self.max_level,
            restart=self.restart,
            ahead=self.ahead,
            rewriter=rewriter,
            success_above=self.success_above,
        )


class _SageLight(WriterKeys):
    raise_at: float = Field(default=0.0, ge=0, le=1)
    lower_above: float | Literal["never"] = 0.35

    def make(self) -> Recorded:
        """Build the scheduler."""
        return SageLight(
            self.plans(),
            max_level=self.max_level,
            raise_at=self.raise_at,
            lower_above=None if isinstance(self.lower_above, str) else self.lower_above,
            success_above=self.success_above,
        )


class _Pope(Levels):
    max_level: int = Field(default=4, ge=1)
    hints_key: str = "oracle_prefixes"
    guided_share: float = Field(default=0.5, gt=0, le=1)
    instruct: bool = True

    def make(self) -> Recorded:
        """Build the scheduler."""
        return Pope(
            self.plans(),
            max_level=self.max_level,
            guided_share=self.guided_share,
            instruct=self.instruct,
            success_above=self.success_above,
        )


class _Questa(Common):
    shares: tuple[float, ...] = (0.5, 0.25)
    epochs: tuple[int, ...] = (1,)

    def make(self) -> Recorded:
        """Build the scheduler."""
        return Questa(
            shares=self.shares,
            epochs=self.epochs,
            solution_key=self.solution_key,
            missing_is_error=self.missing == "error",
            success_above=self.success_above,
        )


class _Scaf(WriterKeys):
    max_level: int = Field(default=4, ge=1)
    scaffold_key: str = "scaffold"
    replacements: int = Field(default=1, ge=1)
    warmup_groups: int = Field(default=0, ge=0)
    original_prompt: bool = False
    graft: bool = False
    tiers: bool = False
    """The writer writes the scaffold: three tiers of four parts."""

    def make(self) -> Recorded:
        """Build the scheduler."""
        return Scaf(
            self.plans(),
            scaffold_key=self.scaffold_key,
            replacements=self.replacements,
            warmup_groups=self.warmup_groups,
            original_prompt=self.original_prompt,
            graft=self.graft,
            success_above=self.success_above,
        )


class _AdHint(Common):
    forces_prefix = True
    bare: int | None = Field(default=None, ge=1)
    hinted: int | None = Field(default=None, ge=1)
    w_min: float = Field(default=0.0, ge=0, le=1)
    w_max: float = Field(default=0.5, ge=0, le=1)
    noise: float = Field(default=0.0, ge=0, le=1)
    weigh_prefix: bool = True

    def make(self) -> Recorded:
        """Build the scheduler."""
        return AdHint(
            bare=self.bare,
            hinted=self.hinted,
            share=PrefixShare(self.w_min, self.w_max, self.noise),
            weigh_prefix=self.weigh_prefix,
            solution_key=self.solution_key,
            missing_is_error=self.missing == "error",
            success_above=self.success_above,
        )


class _Steps(Common):
    forces_prefix = True
    most_steps: int = Field(default=8, ge=2)
    steps_key: str = "steps"


class _StepHint(_Steps):
    most_steps: int = Field(default=4, ge=2)
    bare: int = Field(default=2, ge=1)

    def make(self) -> Recorded:
        """Build the scheduler."""
        return StepHint(
            most_steps=self.most_steps,
            bare=self.bare,
            steps_key=self.steps_key,
            solution_key=self.solution_key,
            missing_is_error=self.missing == "error",
            success_above=self.success_above,
        )


class _Bread(_Steps):
    def make(self) -> Recorded:
        """Build the scheduler."""
        return Bread(
            most_steps=self.most_steps,
            steps_key=self.steps_key,
            solution_key=self.solution_key,
            missing_is_error=self.missing == "error",
            success_above=self.success_above,
        )


_SECTIONS: Mapping[str, type[Common]] = {
    "sage": _Sage,
    "sage_light": _SageLight,
    "pope": _Pope,
    "questa": _Questa,
    "scaf": _Scaf,
    "adhint": _AdHint,
    "stephint": _StepHint,
    "bread": _Bread,
    **SECTIONS,
}


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes the hints of a run before it starts."""

    lm: str
    """`self` or an LM's spec."""
    retries: int
    max_tokens: int
    solution_key: str
    what: Literal["hints", "scaffold", "strategies"] = "hints"
    count: int = 3
    """Texts asked for, of strategies."""

    @property
    def is_policy(self) -> bool:
        """True when the weights that are trained write."""
        return self.lm == "self"

    def to_json(self) -> dict[str, Any]:
        """Return what the hints depend on."""
        return asdict(self)


def writer_of(config: Mapping[str, Any]) -> Writer | None:
    """Return who writes the hints of a `[hints]` section; None where tasks bring them.

    Raises:
        ConfigError: a wrong section.

    >>> writer_of({"name": "sage", "writer": "self"}).is_policy, writer_of({"name": "sage"})
    (True, None)
    """
    section = _section(config)
    lm = getattr(section, "writer", "given")
    if lm == "given" or getattr(section, "rewrite", "never") == "visit":
        return None
    what: Literal["hints", "scaffold", "strategies"] = "hints"
    if isinstance(section, _Scaf) and section.tiers:
        what = "scaffold"
    elif not isinstance(section, WriterKeys):
        what = "strategies"
    options = section.model_dump()
    return Writer(
        lm, options["retries"], options["writer_tokens"], section.solution_key, what,
        count=max(_STRATEGIES, options.get("contexts", 0)),
    )  # fmt: skip


_STRATEGIES = 5
"""Strategies that an LM is asked for, as in NudgeRL's release."""


def method_of(config: Mapping[str, Any]) -> Common:
    """Return a checked `[hints]` section; its class says what a run must know of the method.

    Raises:
        ConfigError: no such method, or a wrong option.
    """
    return _section(config)


def make_scheduler(
    config: Mapping[str, Any],
    written: Mapping[str, float] | None = None,
    tasks: Sequence[Task] = (),
) -> HintScheduler:
    """Return the scheduler of a `[hints]` section.

    Args:
        config: `name` of the method and its options; see docs/hints.md.
        written: figures of writing the hints, kept beside the scheduler's own.
        tasks: training tasks, for methods that show solved ones as examples.

    Raises:
        ConfigError: no such method, or a wrong option.

    >>> make_scheduler({"name": "sage", "max_level": 2}).state_dict()["name"]
    'sage'
    """
    made = _section(config).make()
    made.record.written = dict(written or {})
    if isinstance(made, Icpo):
        made.take_pool(tasks)
    return made


def _section(config: Mapping[str, Any]) -> Common:
    name = str(config.get("name", ""))
    if name not in _SECTIONS:
        near = difflib.get_close_matches(name, _SECTIONS, n=1)
        told = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"hints.name is {name!r}; allowed are {', '.join(_SECTIONS)}{told}")
    section = _SECTIONS[name]
    try:
        return section.model_validate(dict(config))
    except ValidationError as exc:
        raise ConfigError(explain(exc, section, "hints")) from None
