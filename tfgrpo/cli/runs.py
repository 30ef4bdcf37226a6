"""`tfgrpo runs list|purge` and `tfgrpo export`.

Does not know what a run is for. Source: own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from tfgrpo.diagnosis import outcome_of
from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.rollout import Usage
from tfgrpo.runtime.terminal import printable
from tfgrpo.store.export import write_groups
from tfgrpo.store.journal import FILE, Journal
from tfgrpo.store.lock import RunLock

runs_app = typer.Typer(no_args_is_help=True, help="List and purge runs.")
_OURS = (FILE, f"{FILE}-wal")
_METRICS = "metrics.jsonl"
"""What a training run writes each step."""


@runs_app.command("list")
def list_runs(
    root: Annotated[Path, typer.Argument(help="Folder that holds run folders.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List runs: when, what was kept, gain, calls, money."""
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
    """Delete runs with all that lies in their folders."""
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
        found = {file.parent for name in (FILE, _METRICS) for file in root.glob(f"*/{name}")}
        yield from sorted(found)


def _summary(folder: Path) -> dict[str, Any]:
    if not (folder / FILE).is_file():
        return _training(folder)
    try:
        with Journal.open(folder, readonly=True) as store:
            state = store.state()
            finals, results = (
                [payload for _, payload in store.decisions(kind)] for kind in ("final", "result")
            )
    except StoreError as exc:
        return {"run": str(folder), "error": str(exc)}
    settled, booked = Usage(), Usage()
    for row in state.spend:
        settled, booked = settled + row.usage, booked + row.booked
    size = sum((folder / name).stat().st_size for name in _OURS if (folder / name).exists())
    learnt = "step" in state.decisions or finals
    outcome = outcome_of(finals[-1] if finals else None, bool(state.library_id))
    return {
        "run": str(folder),
        "changed": _when(folder / FILE),
        "state": outcome.state if learnt else "",
        "verdict": (results[-1] if results else {}).get("verdict"),
        "gain": (results[-1] if results else {}).get("gain"),
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


def _training(folder: Path) -> dict[str, Any]:
    """Return what a training run wrote of its last step."""
    lines = (folder / _METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    row: dict[str, Any] = {"run": str(folder), "changed": _when(folder / _METRICS)}
    try:
        last = json.loads(lines[-1]) if lines else {}
    except ValueError:
        last = {}
    return row | {"trained_steps": last.get("step", 0), "reward_mean": last.get("reward_mean")}


def _when(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")


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
    state = f", {row['state']}" if row["state"] else ""
    if row["gain"] is not None:
        state += f", gain {row['gain']:+.3f}"
    return (
        f"{name}: {row['changed']}{state}, {row['rollouts']} rollouts in {row['groups']} groups, "
        f"{row['calls']} calls, {money}, {row['bytes'] / 1e6:.1f} MB{cut}"
    )
