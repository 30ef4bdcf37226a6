"""`module:name` in a setting: the object it names, and the folder that such modules may lie in.

Nothing is imported that the settings do not name. Does not know what the object is for. Source:
own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.runtime.files import write_whole

__all__ = [
    "add_module_folder",
    "lazy_exports",
    "load_object",
    "module_folders",
    "note_config",
    "noted_config",
    "noted_module_folder",
]

_NOTE = "modules.json"
_FOLDERS: list[str] = []


def add_module_folder(folder: Path) -> None:
    """Let `module:name` in a config name a module beside the config file.

    The folder comes last, so that no file in it stands in for an installed module.
    """
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.append(path)
    if path not in _FOLDERS:
        _FOLDERS.append(path)


def module_folders() -> tuple[str, ...]:
    """Return the folders that `add_module_folder` was given, for workers elsewhere."""
    return tuple(_FOLDERS)


def note_config(run: Path, config: Path) -> None:
    """Write into a run's folder where its config lay, and with it the modules that it names.

    Raises:
        StoreError: it cannot be written.
    """
    row = {"modules": str(config.parent.resolve()), "config": str(config)}
    try:
        write_whole(run / _NOTE, json.dumps(row) + "\n")
    except OSError as exc:
        raise StoreError(f"{str(run / _NOTE)!r} cannot be written: {exc}") from exc


def noted_module_folder(run: Path) -> Path | None:
    """Return the folder that `note_config` wrote, or None where there is none."""
    found = _note(run).get("modules")
    return Path(found) if isinstance(found, str) else None


def noted_config(run: Path) -> str:
    """Return the path of a run's config as it was given, or a name that stands for it."""
    found = _note(run).get("config")
    return found if isinstance(found, str) else "CONFIG.toml"


def _note(run: Path) -> dict[str, Any]:
    try:
        row = json.loads((run / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # an older run, or a note that was edited: the caller's own folder counts
    return row if isinstance(row, dict) else {}


def load_object(name: Any, where: str) -> Any:
    """Return the object `module:name`; `where` says which setting named it.

    >>> load_object("math:pi", "policy.function")
    3.141592653589793

    Raises:
        ConfigError: the form is wrong, or there is no such module or name.
    """
    module_name, colon, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{where} is {name!r:.80}; give 'module:name'")
    try:
        value: Any = import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"{where}: {name!r} cannot be loaded: {exc}") from exc
    return value


def lazy_exports(
    package: str, home: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package that loads names on first use.

    Args:
        package: the package's `__name__`.
        home: public name to the module that defines it; within the package, or by its full name.
    """

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = home[name] if home[name].startswith("tfgrpo.") else f"{package}.{home[name]}"
        return getattr(import_module(module), name)

    return get, lambda: sorted(home)
