"""Options that a command takes together as one record, shown by typer as options of their own.

typer makes one option of each parameter; a command with many would have as many parameters.
Does not know any command. Source: own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tfgrpo.config.flat_options import flat_parameters, gathered

__all__ = ["flat"]


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command as typer should see it: the fields of its records in their place.

    A record is a frozen dataclass that stands as a parameter's default; its fields are annotated
    like a command's own parameters.
    """
    parameters = flat_parameters(command)

    def run(**options: Any) -> None:
        command(**gathered(command, options))

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # read by inspect
        [p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values()]
    )
    return run
