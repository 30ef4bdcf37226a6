"""Where a run is: its folder, and the server that keeps its journal where one does.

A run's folder holds what it writes for people. Its journal is `run.db` in it, or a run of a
database; then `store.json` in the folder names the address, without password, so that every
command takes the folder as it takes that of any run. An address stands for a run by itself, too:
what is written for people then goes to `runs/NAME`.

Does not know connections or tables. Source: own.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tfgrpo.errors import StoreError
from tfgrpo.runtime.files import write_for_people
from tfgrpo.store.postgres.address import Address, is_address, parse_address
from tfgrpo.store.rows import FILE

__all__ = ["FILE", "POINTER", "Place", "is_run", "place_of", "point_to", "runs_under", "shown"]

POINTER = "store.json"
"""Name of the file that says where else the journal is."""
_RUNS = Path("runs")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run is."""

    folder: Path
    """Where it writes for people."""
    address: Address | None = None
    """Where its journal is; None: in the folder."""

    def __str__(self) -> str:
        return str(self.folder if self.address is None else self.address)


def place_of(where: Path | str, store: str = "") -> Place:
    """Return where a run is.

    Args:
        where: the run's folder, or the address of a run.
        store: the address of the database that keeps the folder's run; it may name the run, else
            the run has the folder's name.

    Raises:
        ConfigError: an address that cannot be read.
        StoreError: a pointer that cannot be read.
    """
    if is_address(where):
        address = parse_address(where)
        if not address.run:
            raise StoreError(
                f"{str(address)!r} names a database and no run: add one, as in {address}#first"
            )
        return Place(_RUNS / address.run, address)
    folder = Path(where)
    if store:
        return Place(folder, parse_address(store, folder.resolve().name))
    if os.path.exists(folder / POINTER):
        return Place(folder, _pointer(folder))
    return Place(folder)


def _pointer(folder: Path) -> Address:
    file = folder / POINTER
    try:
        if file.is_symlink():
            raise StoreError(f"{str(file)!r} is a link; a run's files are never links: remove it")
        return parse_address(str(json.loads(file.read_text(encoding="utf-8"))["store"]))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        if isinstance(exc, StoreError):
            raise
        raise StoreError(
            f"{str(file)!r} does not say where the run's journal is ({exc}): give the run's "
            "address, or write it there again with `tfgrpo learn`"
        ) from exc


def point_to(place: Place) -> None:
    """Leave in the folder where the journal is, without any password.

    Raises:
        StoreError: it cannot be written.
    """
    if place.address is None:
        return
    file = place.folder / POINTER
    text = json.dumps({"store": str(place.address)}) + "\n"
    try:
        place.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            write_for_people(file, text)
    except OSError as exc:
        raise StoreError(f"cannot write {str(file)!r}: {exc.strerror or exc}") from exc


def is_run(folder: Path) -> bool:
    """Tell whether a folder, or an address, is a run's."""
    return is_address(folder) or any(os.path.exists(folder / name) for name in (FILE, POINTER))


def shown(where: Path | str) -> str:
    """Return how a folder or an address is told to people: without secrets."""
    return str(parse_address(where)) if is_address(where) else str(where)


def runs_under(root: Path) -> list[Path]:
    """Return the run folders that a folder is or holds, by name."""
    if not root.is_dir():
        return []
    inner = sorted(p for p in root.iterdir() if p.is_dir() and is_run(p))
    return [root, *inner] if is_run(root) else inner
