"""`tfgrpo runs list|purge` and `tfgrpo export`.

Does not know what a run is for. Source: own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.rollout import Usage
from tfgrpo.runtime.terminal import printable
from tfgrpo.store.export import write_groups
from tfgrpo.store.journal import FILE, Journal
from tfgrpo.store.lock import RunLock

runs_app = typer.Typer(no_args_is_help=True, help="List and purge runs.")
_OURS = (FILE, f"{FILE}-wal")


@runs_app.command("list")
def list_runs(
    root: Annotated[Path, typer.Argument(help="Folder that holds run folders.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the runs under a folder: rollouts, calls, money, whether one was cut off."""
    rows = [_summary(folder) for folder in _runs_under(root)]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    if not rows:
        typer.echo(f"no runs under {printable(str(root))}")
    for row in rows:
        typer.echo(_line(row))


@runs_app.command("purge")
def purge(
    folders: Annotated[list[Path], typer.Argument(help="Run folders to delete.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete runs: journal, replies, prompts and all that lies in the run's folder."""
    for folder in folders:
        if not (folder / FILE).is_file() or folder.is_symlink():
            raise StoreError(
                f"{str(folder)!r} is no run folder (no {FILE}, or a link): nothing was deleted"
            )
    names = ", ".join(printable(str(f)) for f in folders)
    if not yes and not typer.confirm(f"delete {names} and everything in them?"):
        typer.echo("nothing was deleted")
        return
    for folder in folders:
        RunLock(folder / "lock").abandon()  # refuses a run that is in use
        try:
            shutil.rmtree(folder)
        except OSError as exc:
            raise StoreError(f"cannot delete {str(folder)!r}: {exc}") from exc
        typer.echo(f"deleted {printable(str(folder))}")


def export(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    out: Annotated[Path, typer.Argument(help="A .jsonl, .jsonl.gz or .parquet file.")],
    stage: Annotated[
        str | None, typer.Option(help="Only groups of one stage, such as practice.")
    ] = None,
) -> None:
    """Write a run's groups as JSONL or Parquet."""
    with Journal.open(run, readonly=True) as store:
        count = write_groups(out, store.groups(stage))
        lost = store.damaged
    if count == 0 and stage is not None:
        raise ConfigError(f"run {str(run)!r} has no groups of stage {stage!r}")
    typer.echo(f"{count} groups -> {printable(str(out))}")
    for words in lost:
        typer.echo(f"left out, damaged: {printable(words)}", err=True)


def _runs_under(root: Path) -> Iterator[Path]:
    if (root / FILE).is_file():
        yield root
    if root.is_dir():
        for file in sorted(root.glob(f"*/{FILE}")):
            yield file.parent


def _summary(folder: Path) -> dict[str, Any]:
    try:
        with Journal.open(folder, readonly=True) as store:
            state = store.state()
    except StoreError as exc:
        return {"run": str(folder), "error": str(exc)}
    settled, booked = Usage(), Usage()
    for row in state.spend:
        settled, booked = settled + row.usage, booked + row.booked
    size = sum((folder / name).stat().st_size for name in _OURS if (folder / name).exists())
    return {
        "run": str(folder),
        "rollouts": state.rollouts,
        "groups": state.groups,
        "outcomes": dict(state.outcomes),
        "calls": settled.calls,
        "tokens": settled.total_tokens,
        "cost_usd": settled.cost_usd,
        "booked_usd": booked.cost_usd,
        "library": state.library_id,
        "sessions": state.sessions,
        "interruptions": state.interruptions,
        "seconds": round(state.seconds, 3),
        "bytes": size,
    }


def _line(row: dict[str, Any]) -> str:
    name = printable(row["run"])
    if "error" in row:
        return f"{name}: {printable(row['error'])}"
    money = "cost unknown" if row["cost_usd"] is None else f"${row['cost_usd']:.4f}"
    if row["booked_usd"] is None or row["booked_usd"] > 0:
        worst = "unknown" if row["booked_usd"] is None else f"${row['booked_usd']:.4f}"
        money += f" (+ at most {worst} for calls cut off)"
    cut = f", interrupted {row['interruptions']}x" if row["interruptions"] else ""
    return (
        f"{name}: {row['rollouts']} rollouts in {row['groups']} groups, {row['calls']} calls, "
        f"{money}, {row['bytes'] / 1e6:.1f} MB{cut}"
    )
