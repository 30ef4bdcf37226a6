"""What a worker is told once: everything from which it builds policy and verifier by itself.

Plain JSON. It names code (`module:name`) that is installed where the worker runs; it carries no
code, no provider's key and no token. Does not know units. Source: own.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

from tfgrpo.execute.protocol import UnitSettings
from tfgrpo.protocols import LM, Policy, Verifier
from tfgrpo.runtime.canonical import digest
from tfgrpo.workers.remote_lm import LmFacts

__all__ = ["Builder", "WorkSpec", "software"]

Builder = Callable[[Mapping[str, Any], Callable[[str], LM]], tuple[Policy, "Verifier | None"]]
"""Makes policy and verifier of `WorkSpec.values` and of LMs by name."""


@lru_cache(1)
def software() -> str:
    """Return what must be equal on all workers: the package's version and Python's minor one."""
    try:
        package = version("tfgrpo")
    except PackageNotFoundError:  # run from a plain checkout
        package = "unknown"
    return f"tfgrpo {package}, Python {platform.python_version().rpartition('.')[0]}"


@dataclass(frozen=True)
class WorkSpec:
    """One policy under one verifier, for workers."""

    builder: str
    """A `Builder` as `module:name`."""
    values: Mapping[str, Any]
    """What the builder is given: JSON."""
    settings: UnitSettings
    policy_id: str
    verifier_id: str
    """Both as in the run's process: a worker whose own differ has other code and is refused."""
    lms: Mapping[str, LmFacts]
    """The run's LMs by the name that the endpoint gives them."""
    folders: tuple[str, ...] = ()
    """Where `module:name` of the settings may lie, beside what is installed."""

    @cached_property
    def digest(self) -> str:
        """The name of the work in messages."""
        return digest(self.to_dict(), 16)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        settings = self.settings
        return {
            "builder": self.builder,
            "values": dict(self.values),
            "settings": [settings.timeout_s, settings.verifier_timeout_s, settings.on_truncated],
            "policy_id": self.policy_id,
            "verifier_id": self.verifier_id,
            "lms": {name: facts.to_dict() for name, facts in self.lms.items()},
            "folders": list(self.folders),
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a work from its JSON form."""
        return cls(
            row["builder"],
            row["values"],
            UnitSettings(*row["settings"]),
            row["policy_id"],
            row["verifier_id"],
            {name: LmFacts(**facts) for name, facts in row["lms"].items()},
            tuple(row["folders"]),
        )
