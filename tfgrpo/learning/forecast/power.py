"""Which gains a run can keep and show, from the sizes of its splits alone.

What decides is the choice on the gate split at the end: its interval must exclude zero, at a level
that grows stricter with every comparison. A split too small for that makes a run vain whatever was
learnt, so it is said before anything is spent. Does not know calls or money. Source: own.
"""

from __future__ import annotations

from tfgrpo.config.learn import Config
from tfgrpo.statistics import choice_level, min_detectable, tasks_needed

__all__ = ["keepable_gain", "power_notes", "power_warnings"]

_HOPELESS = 0.5
"""A gate that needs a larger gain than this, of rewards from 0 to 1, is worth a warning."""
_AIM = 0.35
_FEWEST = 4


def keepable_gain(config: Config, n_gate: int) -> float | None:
    """Return the smallest true gain that the gate keeps with 80 % power, worst case; None without.

    The first comparison is the least strict, so no later one keeps less.
    """
    if not config.gate.enabled or n_gate < 2:
        return None
    return min_detectable(n_gate, config.gate.group_size, level=choice_level(1))


def power_notes(
    config: Config, n_gate: int, keepable: float | None, n_test: int, smallest: float | None
) -> list[str]:
    """Return what gate and test can show, in words."""
    notes = []
    if keepable is not None:
        notes.append(
            f"gate: {n_gate} tasks x {config.gate.group_size} draws keep a library that gains "
            f"{keepable:.2f} or more (80 % power, worst case, rewards from 0 to 1); a smaller gain "
            "may end as 'candidate, not kept'"
        )
    if smallest is None:
        notes.append("no test split: nothing will be proven")
    else:
        notes.append(
            f"test: {n_test} tasks x {config.gate.test_group_size} draws find a true difference of "
            f"{smallest:.2f} (80 % power, worst case)"
        )
    return notes


def power_warnings(config: Config, sizes: tuple[int, int, int]) -> list[str]:
    """Return a warning where the gate can keep very large gains only, with sizes that keep smaller.

    Args:
        config: draws a gate task.
        sizes: practice, gate and test tasks.
    """
    practice, gate, test = sizes
    keepable = keepable_gain(config, gate)
    if config.gate.enabled and gate == 1:
        return ["one gate task decides nothing: every candidate will end as not kept"]
    if keepable is None or keepable < _HOPELESS or not practice:
        return []
    words = f"with {gate} gate tasks only a gain of about {keepable:.2f} is kept"
    if keepable >= 1:
        words = f"with {gate} gate tasks not even a gain of 1 is surely kept"
    better = _better_sizes(config, practice + gate + test)
    if better is not None and better[1] > gate:
        found = keepable_gain(config, better[1])
        words += (
            f"; of these {sum(sizes)} tasks, practice = {better[0]}, gate = {better[1]}, "
            f"test = {better[2]} would keep {found:.2f}"
        )
    needed = tasks_needed(_AIM, config.gate.group_size, level=choice_level(1))
    return [words + f"; {needed} gate tasks keep a gain of {_AIM:g}"]


def _better_sizes(config: Config, total: int) -> tuple[int, int, int] | None:
    """Return sizes that give the gate most and leave something to learn from and to prove with."""
    practice, test = max(_FEWEST, total // 5), max(_FEWEST, total // 4)
    gate = total - practice - test
    return (practice, gate, test) if gate >= _FEWEST else None
