"""The `[hints]` section of a training run, checked and made into a scheduler.

Does not know how schedulers work. Source: own.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tfgrpo.config.sections import explain
from tfgrpo.errors import ConfigError
from tfgrpo.hints.adhint import AdHint, PrefixShare
from tfgrpo.hints.bread import Bread
from tfgrpo.hints.metadata import MetadataHints
from tfgrpo.hints.pope import Pope
from tfgrpo.hints.questa import Questa
from tfgrpo.hints.sage import Sage, SageLight
from tfgrpo.hints.scaf import Scaf
from tfgrpo.hints.state import Record
from tfgrpo.hints.stephint import StepHint
from tfgrpo.protocols import HintScheduler


class Recorded(HintScheduler, Protocol):
    """A scheduler that keeps a `Record`."""

    record: Record


class _Common(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    success_above: float = 0.0
    solution_key: str = "solution"
    missing: Literal["error", "plain"] = "error"


class _Levels(_Common):
    max_level: int = Field(default=3, ge=1)
    hints_key: str = "hints"

    def plans(self) -> MetadataHints:
        """Where this section's hint texts come from."""
        return MetadataHints(self.max_level, self.hints_key, self.solution_key, self.missing)


class _Written(_Levels):
    writer: str = "given"
    """`given` reads the tasks' hints and solutions; `self` has the policy write hints before
    training; else the spec of a teacher LM."""
    retries: int = Field(default=3, ge=0)
    writer_tokens: int = Field(default=512, ge=1)


class _Sage(_Written):
    restart: bool = True
    ahead: bool = False

    def make(self) -> Recorded:
        """Build the scheduler."""
        return Sage(
            self.plans(),
            max_level=self.max_level,
            restart=self.restart,
            ahead=self.ahead,
            success_above=self.success_above,
        )


class _SageLight(_Written):
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


class _Pope(_Levels):
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


class _Questa(_Common):
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


class _Scaf(_Written):
    max_level: int = Field(default=4, ge=1)
    scaffold_key: str = "scaffold"
    replacements: int = Field(default=1, ge=1)
    warmup_groups: int = Field(default=0, ge=0)
    original_prompt: bool = False

    def make(self) -> Recorded:
        """Build the scheduler."""
        return Scaf(
            self.plans(),
            scaffold_key=self.scaffold_key,
            replacements=self.replacements,
            warmup_groups=self.warmup_groups,
            original_prompt=self.original_prompt,
            success_above=self.success_above,
        )


class _AdHint(_Common):
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


class _Steps(_Common):
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


_Section = _Sage | _SageLight | _Pope | _Questa | _Scaf | _AdHint | _StepHint | _Bread
_SECTIONS: Mapping[str, type[_Section]] = {
    "sage": _Sage,
    "sage_light": _SageLight,
    "pope": _Pope,
    "questa": _Questa,
    "scaf": _Scaf,
    "adhint": _AdHint,
    "stephint": _StepHint,
    "bread": _Bread,
}


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes the hints of a run before it starts."""

    lm: str
    """`self` or an LM's spec."""
    retries: int
    max_tokens: int
    solution_key: str

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
    if not isinstance(section, _Written) or section.writer == "given":
        return None
    return Writer(section.writer, section.retries, section.writer_tokens, section.solution_key)


def make_scheduler(
    config: Mapping[str, Any], written: Mapping[str, float] | None = None
) -> HintScheduler:
    """Return the scheduler of a `[hints]` section.

    Args:
        config: `name` of the method and its options; see docs/hints.md.
        written: figures of writing the hints, kept beside the scheduler's own.

    Raises:
        ConfigError: no such method, or a wrong option.

    >>> make_scheduler({"name": "sage", "max_level": 2}).state_dict()["name"]
    'sage'
    """
    made = _section(config).make()
    made.record.written = dict(written or {})
    return made


def _section(config: Mapping[str, Any]) -> _Section:
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
