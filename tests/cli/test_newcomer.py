"""A stranger types README and tutorial in order: no command leads nowhere, whatever came before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.users.newcomer import OUTCOMES, commands, walk

pytestmark = [pytest.mark.real, pytest.mark.long]


def test_the_commands_are_those_of_the_pages() -> None:
    found = commands()
    assert found.index("tfgrpo learn first/config.toml") < found.index("tfgrpo advise runs/first")
    assert "tfgrpo learn mine/config.toml" in found
    assert sum(c.startswith("python:") for c in found) >= 3


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_no_command_is_a_dead_end(outcome: str, tmp_path: Path) -> None:
    steps = list(walk(outcome, tmp_path, fast=True))
    assert [(s.command, s.dead_end) for s in steps if s.dead_end] == []
    learnt = {s.code for s in steps if s.command.startswith("tfgrpo learn first/config.toml")}
    expected = {"stopped": {0, 130}, "failed": {0, 5}}.get(outcome, {0, 1})
    assert learnt <= expected
