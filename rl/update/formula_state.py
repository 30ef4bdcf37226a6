"""State that formulas keep between training steps: tracked quantiles, multipliers, step sizes.

An entry of a registry with `after_step` has state: named numbers, given to its function as options
and moved after each step. In the checkpoint and in the log. Does not know formulas. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfgrpo.rl.formulas.registry import Entry


class FormulaState:
    """Named numbers of each entry in use."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, float]] = {}
        self.mean_entropy = 0.0
        """Of the last batch's tokens, nats, where a bonus depends on it."""

    def options(self, entry: Entry) -> dict[str, float]:
        """Return what an entry's function is given besides its options."""
        known = entry.fn.__kwdefaults__ or {}
        return {n: v for n, v in self._of.get(entry.name, {}).items() if n in known}

    def advance(self, entry: Entry, seen: Any, options: Mapping[str, Any]) -> None:
        """Move an entry's state by what a step saw."""
        if entry.after_step is not None:
            self._of[entry.name] = entry.after_step(self._of.get(entry.name, {}), seen, options)

    @property
    def lr_scale(self) -> float:
        """Factor of the learning rate that entries ask for."""
        found = 1.0
        for state in self._of.values():
            found *= state.get("lr_scale", 1.0)
        return found

    def figures(self) -> dict[str, float]:
        """Return the state for the log, as `state_ENTRY_NAME`."""
        return {f"state_{e}_{n}": v for e, state in self._of.items() for n, v in state.items()}

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the state as JSON."""
        whole = {name: dict(state) for name, state in self._of.items()}
        return whole | ({"entropy": {"mean": self.mean_entropy}} if self.mean_entropy else {})

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore what `state_dict` returned."""
        self._of = {name: dict(values) for name, values in state.items() if name != "entropy"}
        self.mean_entropy = state.get("entropy", {}).get("mean", 0.0)
