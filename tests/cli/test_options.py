"""Records of options as typer shows them, and as a command gets them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.testing import CliRunner

from tfgrpo.cli.options import flat


@dataclass(frozen=True)
class Sizes:
    small: Annotated[int, typer.Option(help="The small one.", min=1)] = 1
    names: Annotated[list[str] | None, typer.Option("--name", help="Any number.")] = None


DEFAULT = Sizes()
given: list[Any] = []


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    sizes: Sizes = DEFAULT,
    quiet: Annotated[bool, typer.Option("--quiet")] = False,
) -> None:
    """Do it."""
    given.append((run, sizes, quiet))


def ran(*arguments: str) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(flat(command))
    given.clear()
    return CliRunner().invoke(app, list(arguments))


def test_fields_are_options_of_their_own_and_reach_the_command_as_a_record() -> None:
    assert ran("here", "--small", "3", "--name", "a", "--name", "b", "--quiet").exit_code == 0
    assert given == [(Path("here"), Sizes(3, ["a", "b"]), True)]


def test_what_is_not_given_equals_the_default_record() -> None:
    assert ran("here").exit_code == 0
    assert given == [(Path("here"), DEFAULT, False)]


def test_options_are_checked_and_described_as_a_command_s_own() -> None:
    assert ran("here", "--small", "0").exit_code == 2
    text = ran("--help").stdout
    assert "Do it." in text and "The small one." in text and "RUN" in text
    assert "--sizes" not in text
