"""`tfgrpo runs list|copy|migrate|purge` and `tfgrpo export`.

A run is named by its folder or, on a server, by its address. Does not know what a run is for.
Source: own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.report.served.rows import METRICS, run_row
from tfgrpo.runtime.terminal import printable
from tfgrpo.store.disk.lock import RunLock
from tfgrpo.store.export import write_groups
from tfgrpo.store.journal import FILE, Journal
from tfgrpo.store.postgres.address import is_address, parse_address
from tfgrpo.store.postgres.copying import copy_run
from tfgrpo.store.postgres.opening import list_runs as runs_of_server
from tfgrpo.store.postgres.opening import migrate_database, purge_run
from tfgrpo.store.postgres.places import Place, is_run, place_of, runs_under, shown

runs_app = typer.Typer(no_args_is_help=True, help="List, copy and purge runs.")


@runs_app.command("list")
def list_runs(
    root: Annotated[
        Path, typer.Argument(help="Folder that holds run folders, or the address of a database.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List runs: when, what was kept, gain, calls, money."""
    rows = [run_row(place) for place in _runs_in(root)]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    if not rows:
        typer.echo(f"no runs under {printable(shown(root))}")
    for row in rows:
        typer.echo(_line(row))


@runs_app.command("copy")
def copy(
    source: Annotated[str, typer.Argument(help="A run's folder, or its address on a server.")],
    target: Annotated[
        str, typer.Argument(help="A folder without a run, or an address: postgresql://…#NAME.")
    ],
) -> None:
    """Copy a run to a server or from one.

    Between a folder and a PostgreSQL server; the copy is proved to be equal.

    Rows are counted and hashed on both sides; where they differ nothing is kept.
    """
    origin = place_of(source)
    if is_address(target):
        goal = Place(Path(), parse_address(target, origin.folder.resolve().name))
    else:
        goal = Place(Path(target))
    done = copy_run(origin, goal)
    typer.echo(f"{done.total} rows -> {printable(str(goal))}; counts and digests are equal")


@runs_app.command("migrate")
def migrate(
    address: Annotated[str, typer.Argument(help="A database: postgresql://USER@HOST/DATABASE.")],
) -> None:
    """Bring a database up to this version.

    Stop all writers first.
    """
    database = parse_address(address)
    applied = migrate_database(database)
    what = f"applied {', '.join(map(str, applied))}" if applied else "nothing to do"
    typer.echo(f"{printable(database.shown)}: {what}")


@runs_app.command("purge")
def purge(
    folders: Annotated[list[Path], typer.Argument(help="Run folders or addresses to delete.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete runs with all that lies in their folders."""
    for folder in folders:
        if not is_run(folder) or (not is_address(folder) and folder.is_symlink()):
            raise StoreError(
                f"{shown(folder)!r} is no run folder (no {FILE}, or a link): nothing was deleted"
            )
    places = [place_of(folder) for folder in folders]
    names = ", ".join(printable(_name(f, p)) for f, p in zip(folders, places, strict=True))
    if not yes and not typer.confirm(f"delete {names} and everything in them?"):
        typer.echo("nothing was deleted")
        return
    for folder, place in zip(folders, places, strict=True):
        if place.address is not None:
            purge_run(place.address)
        if not is_address(folder):
            _delete(folder)
        typer.echo(f"deleted {printable(_name(folder, place))}")


def _name(given: Path, place: Place) -> str:
    """Return how a run is called: its folder, and where its journal is where that is elsewhere."""
    if place.address is None or is_address(given):
        return str(place)
    return f"{given} ({place.address})"


def _delete(folder: Path) -> None:
    if (folder / FILE).exists():
        RunLock(folder / "lock").abandon()  # refuses a run that is in use
    try:
        shutil.rmtree(folder)
    except OSError as exc:
        raise StoreError(f"cannot delete {str(folder)!r}: {exc}") from exc


def export(
    run: Annotated[Path, typer.Argument(help="The run's folder, or its address.")],
    out: Annotated[Path, typer.Argument(help="A .jsonl, .jsonl.gz or .parquet file.")],
    stage: Annotated[
        str | None, typer.Option(help="Only groups of one stage, such as practice.")
    ] = None,
) -> None:
    """Write a run's groups as JSONL or Parquet."""
    with Journal.open(run, readonly=True) as store:
        count = write_groups(out, store.groups(stage))
        lost, name = store.damaged, str(store.place)
    if count == 0 and stage is not None:
        raise ConfigError(f"run {name!r} has no groups of stage {stage!r}")
    typer.echo(f"{count} groups -> {printable(str(out))}")
    for words in lost:
        typer.echo(f"left out, damaged: {printable(words)}", err=True)


def _runs_in(root: Path) -> list[Path | str]:
    if not is_address(root):
        found = runs_under(root)
        trained = {file.parent for file in root.glob(f"*/{METRICS}")}.difference(found)
        return [*found, *sorted(trained)]
    address = parse_address(root)
    names = [address.run] if address.run else runs_of_server(address)
    return [address.named(name).whole for name in names]


def _line(row: dict[str, Any]) -> str:
    name = printable(row["run"])
    if "error" in row:
        return f"{name}: {printable(row['error'])}"
    if "trained_steps" in row:
        reward = row["reward_mean"]
        mean = "" if reward is None else f", mean reward {reward:.3f}"
        return f"{name}: {row['changed']}, training, {row['trained_steps']} steps{mean}"
    money = "cost unknown" if row["cost_usd"] is None else f"${row['cost_usd']:.4f}"
    if row["booked_usd"] is None or row["booked_usd"] > 0:
        worst = "unknown" if row["booked_usd"] is None else f"${row['booked_usd']:.4f}"
        money += f" (+ at most {worst} for calls cut off)"
    cut = f", interrupted {row['interruptions']}x" if row["interruptions"] else ""
    size = "on a server" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f} MB"
    cut += f"; {printable(row['damaged'][0])}" if row["damaged"] else ""
    state = f", {row['state']}" if row["state"] else ""
    if row["gain"] is not None:
        state += f", gain {row['gain']:+.3f}"
    return (
        f"{name}: {row['changed']}{state}, {row['rollouts']} rollouts in {row['groups']} groups, "
        f"{row['calls']} calls, {money}, {size}{cut}"
    )
