"""The `[hints]` section of a training run, checked and made into a scheduler.

Does not know how schedulers work, except which of them a trainer can run: those whose help stands
in the prompt of a whole group. Source: own.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tfgrpo.config import _explain
from tfgrpo.errors import ConfigError
from tfgrpo.protocols import HintScheduler
from tfgrpo.rl.hints.pope import Pope
from tfgrpo.rl.hints.questa import Questa
from tfgrpo.rl.hints.sage import Sage, SageLight
from tfgrpo.rl.hints.texts import MetadataHints

NOT_RUNNABLE: Mapping[str, str] = {
    "scaf": "single rollouts under several contexts merged into one group",
    "adhint": "responses that start with a forced prefix, and two sets of rollouts a group",
    "stephint": "responses that start with a forced prefix, and several plans a group",
    "bread": "responses that start with a forced prefix",
}
"""Methods that stand here as functions, and what a trainer would need to run them."""


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


class _Sage(_Levels):
    restart: bool = True

    def make(self) -> HintScheduler:
        """Build the scheduler."""
        return Sage(
            self.plans(),
            max_level=self.max_level,
            restart=self.restart,
            success_above=self.success_above,
        )


class _SageLight(_Levels):
    raise_at: float = Field(default=0.0, ge=0, le=1)
    lower_above: float | Literal["never"] = 0.35

    def make(self) -> HintScheduler:
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

    def make(self) -> HintScheduler:
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

    def make(self) -> HintScheduler:
        """Build the scheduler."""
        return Questa(
            shares=self.shares,
            epochs=self.epochs,
            solution_key=self.solution_key,
            missing_is_error=self.missing == "error",
            success_above=self.success_above,
        )


_SECTIONS: Mapping[str, type[_Sage | _SageLight | _Pope | _Questa]] = {
    "sage": _Sage,
    "sage_light": _SageLight,
    "pope": _Pope,
    "questa": _Questa,
}


def make_scheduler(config: Mapping[str, Any]) -> HintScheduler:
    """Return the scheduler of a `[hints]` section.

    Args:
        config: `name` (`sage`, `sage_light`, `pope`, `questa`) and the method's options; see
            docs/hints.md.

    Raises:
        ConfigError: no such method, one that a trainer cannot run yet, or a wrong option.

    >>> make_scheduler({"name": "sage", "max_level": 2}).state_dict()["name"]
    'sage'
    """
    name = str(config.get("name", ""))
    if name in NOT_RUNNABLE:
        raise ConfigError(
            f"hints.name = {name!r}: training cannot run it yet, because it needs "
            f"{NOT_RUNNABLE[name]}; its parts are functions in tfgrpo.rl.hints. "
            f"Runnable are {', '.join(_SECTIONS)}"
        )
    if name not in _SECTIONS:
        near = difflib.get_close_matches(name, [*_SECTIONS, *NOT_RUNNABLE], n=1)
        told = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"hints.name is {name!r}; allowed are {', '.join(_SECTIONS)}{told}")
    section = _SECTIONS[name]
    try:
        return section.model_validate(dict(config)).make()
    except ValidationError as exc:
        raise ConfigError(_explain(exc, section, "hints")) from None
