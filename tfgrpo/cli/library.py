"""`tfgrpo library`: show, compare, pin, ban, release, undo and export libraries.

A library is named by a run's folder (its newest version, or `FOLDER@VERSION`), an artefact's
folder, or a `library.json`. Changes are written where the library came from: a further version in
the run's journal, or the artefact's files anew. Records go to standard output, as text or with
`--json` as JSON. Does not know models; no command here calls one. Source: own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from tfgrpo.diagnosis import RunOutcome, outcome_of
from tfgrpo.errors import ConfigError, EditError
from tfgrpo.experience.artefact import (
    Artefact,
    Card,
    export_artefact,
    load_artefact,
    package_version,
    scan,
)
from tfgrpo.experience.entry import Experience
from tfgrpo.experience.library import EMPTY_LIBRARY, Library
from tfgrpo.experience.settings import PRESETS, preset
from tfgrpo.report.reflection import claim_words
from tfgrpo.runtime.import_string import noted_config
from tfgrpo.runtime.terminal import one_line, printable
from tfgrpo.store import Journal
from tfgrpo.store.postgres.address import is_address
from tfgrpo.store.postgres.places import is_run, place_of, shown

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

Where = Annotated[
    str, typer.Argument(help="Run folder[@VERSION], artefact folder or library.json.")
]
Ident = Annotated[str, typer.Argument(help="Experience id, such as E3.")]
Reason = Annotated[str, typer.Option("--reason", help="Kept in the entry's history.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a library was found."""

    path: Path
    artefact: Artefact
    is_run: bool
    """True where it is a version of a run's journal."""
    outcome: RunOutcome | None = None
    """What became of the run's libraries; None for an artefact that is no run's."""
    versions: tuple[str, ...] = ()
    """Of the run, oldest first."""

    @property
    def library(self) -> Library:
        """The library itself."""
        return self.artefact.library

    @property
    def state(self) -> str:
        """What became of this library, and why; empty where no run tells."""
        if self.outcome is None:
            return ""
        word = self.outcome.word_of(self.library.version_id)
        if not self.is_run and not self.library.shown:
            word = self.outcome.state
        return f"{word}: {self.outcome.reason}" if self.outcome.reason else word

    def save(self, library: Library) -> None:
        """Write a changed library back."""
        if self.is_run:
            with Journal.open(self.path) as store:
                store.record_library(library.version_id, library.to_dict())
            return
        folder = self.path if self.path.is_dir() else self.path.parent
        if is_run(folder):  # so that report, escalate and a rerun know of it
            with Journal.open(folder) as store:
                store.record_library(library.version_id, library.to_dict())
                row = {"from": self.library.version_id, "to": library.version_id}
                store.record_decision("edited", row, key=library.version_id)
        export_artefact(replace(self.artefact, library=library), folder)


def find(where: str) -> Source:
    """Find a library by folder, file or `FOLDER@VERSION`.

    Raises:
        ConfigError: nothing of the kind is there, or the version is unknown.
        StoreError: it cannot be read.
    """
    path = Path(where)
    if path.is_file() or (path / "library.json").is_file():
        found = _run_of(path) if is_run(path) else None
        outcome, versions = (None, ()) if found is None else (found.outcome, found.versions)
        return Source(path, load_artefact(path), False, outcome, versions)
    folder, _, version = _split_version(where)
    path = Path(folder)
    if not (path.is_dir() or is_address(folder)):
        raise ConfigError(
            f"no library at {shown(where)!r}: give a run's folder, an artefact's folder or a "
            "library.json"
        )
    found = _run_of(folder)
    matching = [payload for key, payload in found.libraries if key.startswith(version)]
    if version and not matching:
        there = f"there are: {', '.join(found.versions)}" if found.versions else "there is none yet"
        raise ConfigError(f"run {found.name!r} has no version {version!r}; {there}")
    library = Library.from_dict(matching[-1]) if matching else EMPTY_LIBRARY
    source = Source(path, Artefact(library), True, found.outcome, found.versions)
    state = (source.state,) if matching else ()
    card = Card(
        name=place_of(folder).folder.name,
        limits=state,
        created=datetime.now(UTC).date().isoformat(),
        package_version=package_version(),
    )
    artefact = Artefact(library, card, **_injection(found.config))
    return replace(source, artefact=artefact)


@dataclass(frozen=True, slots=True)
class _Run:
    """What a run's journal says of its libraries."""

    name: str
    libraries: list[tuple[str, Any]]
    outcome: RunOutcome
    config: Any

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key for key, _ in self.libraries))


def _run_of(where: Path | str) -> _Run:
    with Journal.open(where, readonly=True) as store:
        rows = store.libraries()
        finals = [payload for _, payload in store.decisions("final")]
        outcome = outcome_of(finals[-1] if finals else None, bool(rows))
        return _Run(str(store.place), rows, outcome, store.config or {})


def _split_version(where: str) -> tuple[str, str, str]:
    """Cut `@VERSION` off; in an address, behind the run's name only."""
    place, mark, name = where.rpartition("#") if is_address(where) else ("", "", where)
    if "@" not in name:
        return where, "", ""
    name, at, version = name.rpartition("@")
    return place + mark + name, at, version


def _injection(config: Any) -> dict[str, Any]:
    """Return how the run injects, from its settings."""
    settings = (config.get("learn") or {}).get("settings") or {}
    policy = config.get("policy") or {}
    learn = config.get("learn") or {}
    # Runs of versions before the flow `reflect` know no pool; theirs was what is now `contrast`.
    name = learn.get("preset", "default") if "pool" in learn else "contrast"
    base = preset(name) if name in PRESETS else preset("contrast")
    found = {"placement": base.deployed_placement, "template": base.template}
    found |= {key: settings[key] for key in ("placement", "template") if key in settings}
    return found | ({"system": policy["system"]} if policy.get("system") else {})


@app.command()
def show(
    where: Where,
    everything: Annotated[bool, typer.Option("--all", help="Also banned and quarantined.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the entries of a library."""
    source = find(where)
    library = source.library
    if as_json:
        _print_json(library.to_dict() | {"scan": scan(library), "state": source.state})
        return
    for line in _state_lines(source, where):
        typer.echo(printable(line))
    typer.echo(
        f"version {library.version_id}, {len(library.shown)} of {len(library.entries)} entries "
        f"shown, about {library.tokens()} tokens"
    )
    for entry in library.entries if everything else library.shown:
        typer.echo(_line(entry))
    for line in _scan_lines(library):
        typer.echo(line)


def _scan_lines(library: Library) -> list[str]:
    """Return one line a finding with all entries that it is about, so that a rare one shows."""
    entries: dict[str, list[str]] = {}
    for key, finding in scan(library):
        entries.setdefault(finding, []).append(key)
    rarest_first = sorted(entries.items(), key=lambda row: len(row[1]))
    return [f"look at {', '.join(keys)}: {finding}" for finding, keys in rarest_first]


def _state_lines(source: Source, where: str) -> list[str]:
    """Say first whether a run kept what is shown, and where its candidates are."""
    if source.outcome is None:
        return []
    lines = [source.state]
    run = shown(source.path)
    if source.outcome.state == "not ended":
        config = noted_config(place_of(source.path).folder)
        lines.append(f"the run has not ended: tfgrpo learn {config} goes on")
    elif not source.library.shown and source.versions:
        lines.append("candidates: " + ", ".join(f"{run}@{v}" for v in source.versions))
    if not source.outcome.is_kept and source.outcome.state != "not ended":
        lines.append(f"why: tfgrpo advise {run}")
    return lines


@app.command()
def diff(first: Where, second: Where, as_json: AsJson = False) -> None:
    """Print what leads from one library to another."""
    change = find(first).library.diff(find(second).library)
    if as_json:
        _print_json(
            {
                "added": [e.to_dict() for e in change.added],
                "removed": [e.to_dict() for e in change.removed],
                "changed": [[a.to_dict(), b.to_dict()] for a, b in change.changed],
            }
        )
        return
    for line in change.lines() or ["no difference"]:
        typer.echo(one_line(line, 400))


@app.command()
def pin(where: Where, experience_id: Ident, reason: Reason = "", as_json: AsJson = False) -> None:
    """Keep an entry whatever is proposed or evicted."""
    _change(where, lambda lib: lib.with_status(experience_id, "pinned", reason=reason), as_json)


@app.command()
def ban(where: Where, experience_id: Ident, reason: Reason = "", as_json: AsJson = False) -> None:
    """Take an entry out for good; the same words never come back."""
    _change(where, lambda lib: lib.with_status(experience_id, "banned", reason=reason), as_json)


@app.command()
def release(
    where: Where, experience_id: Ident, reason: Reason = "", as_json: AsJson = False
) -> None:
    """Make a pinned, banned or quarantined entry an ordinary one."""
    _change(where, lambda lib: lib.with_status(experience_id, "active", reason=reason), as_json)


@app.command()
def undo(
    where: Where,
    count: Annotated[int, typer.Option("--count", min=1, help="How many changes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Take back the last changes."""
    _change(where, lambda lib: lib.undo(count), as_json)


@app.command()
def export(
    where: Where,
    folder: Annotated[Path, typer.Argument(help="Folder to write into.")],
    as_json: AsJson = False,
) -> None:
    """Write the library in every form into a folder."""
    source = find(where)
    artefact = source.artefact
    paths = export_artefact(artefact, folder)
    if as_json:
        _print_json(
            {
                "version_id": artefact.library.version_id,
                "render_hash": artefact.render_hash,
                "files": {name: str(path) for name, path in paths.items()},
            }
        )
        return
    for path in paths.values():
        typer.echo(printable(str(path)))
    if source.state and not source.state.startswith("kept"):
        typer.echo(printable(f"note: {source.state}"), err=True)


def _change(where: str, make: Callable[[Library], Library], as_json: bool) -> None:
    if "@" in where and not Path(where).exists():
        raise EditError(
            f"{where!r} names a past version; changes go to the newest: leave out the @VERSION"
        )
    source = find(where)
    library = make(source.library)
    if library is not source.library:
        source.save(library)
    if as_json:
        _print_json({"before": source.library.version_id, "after": library.version_id})
        return
    for line in source.library.diff(library).lines() or ["no difference in what prompts hold"]:
        typer.echo(one_line(line, 400))
    typer.echo(f"version {source.library.version_id} -> {library.version_id}")


def _line(entry: Experience) -> str:
    value = ""
    if entry.value is not None:
        value = (
            f" value {entry.value.estimate:+.3f} [{entry.value.low:+.3f}, {entry.value.high:+.3f}]"
        )
    claim = claim_words(entry.to_dict())
    rests = f" ({claim})" if claim else ""
    head = f"{entry.experience_id} {entry.kind} {entry.status} trust={entry.trust}{value}{rests}: "
    return head + one_line(entry.body, 400)


def _print_json(row: Any) -> None:
    typer.echo(json.dumps(row, ensure_ascii=True))
