"""`tfgrpo report RUN`, `tfgrpo view` and `tfgrpo advise RUN`.

Records go to standard output, remarks to standard error. The verdict printed, the JSON and the
exit code come from one object. Does not know how a report is made. Source: own.
"""

from __future__ import annotations

import json
import sys
import webbrowser
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tfgrpo.cli.options import flat
from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.report.next_steps import advise_on
from tfgrpo.report.view import load_view
from tfgrpo.runtime.files import write_for_people
from tfgrpo.runtime.terminal import printable
from tfgrpo.statistics.verdict import VerdictRule, make_rule
from tfgrpo.store.postgres.places import is_run, place_of

if TYPE_CHECKING:
    from tfgrpo.report.served import LiveServer

__all__ = ["advise", "report", "view"]


class Format(StrEnum):
    """How a report is written."""

    html = "html"
    json = "json"
    md = "md"
    junit = "junit"


_Run = Annotated[Path, typer.Argument(help="The run's folder, or its address.", metavar="RUN")]


@dataclass(frozen=True)
class VerdictOptions:
    """What the run must reach."""

    min_mean: Annotated[float | None, typer.Option(help="Verdict: mean reaches this.")] = None
    min_share: Annotated[
        float | None, typer.Option(help="Verdict: this share of tasks reaches --score.")
    ] = None
    score: Annotated[float | None, typer.Option(help="The score for --min-share.")] = None
    min_each: Annotated[float | None, typer.Option(help="Verdict: each task reaches this.")] = None
    min_gain: Annotated[
        float | None, typer.Option(help="Verdict: gain over no library passes this.")
    ] = None


_NO_VERDICT = VerdictOptions()


@flat
def report(
    run: _Run,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write; - for standard output."),
    ] = None,
    format: Annotated[Format, typer.Option("--format", "-f", help="Form.")] = Format.html,
    level: Annotated[float, typer.Option(help="Level of all intervals.")] = 0.95,
    asked: VerdictOptions = _NO_VERDICT,
    live: Annotated[bool, typer.Option("--live", help="Serve it on 127.0.0.1 instead.")] = False,
    port: Annotated[int, typer.Option(help="Port of --live; 0 takes a free one.")] = 0,
) -> None:
    """Write the report of a run: did it help, by how much, how sure, at what cost.

    HTML goes to RUN/report.html, other forms to standard output. With a verdict option the exit
    code is the verdict: 0 met, 1 not met, 5 inconclusive; without one it is 0.
    """
    if not 0 < level < 1:
        raise ConfigError(f"--level {level!r} is no probability: give one such as 0.95")
    if live:
        _serve(run, port)
        return
    if _is_training(run):
        _report_training(run, out, format)
        return
    rule = None if asked == _NO_VERDICT else make_rule(**asdict(asked))
    text, verdict = _render(run, format, rule, level)
    target = out or (place_of(run).folder / "report.html" if format is Format.html else Path("-"))
    if str(target) == "-":
        sys.stdout.write(printable(text))
    else:
        _write(target, text)
        typer.echo(str(target))
    typer.echo(printable(verdict["text"]), err=True)
    if rule is not None:
        raise typer.Exit(verdict["exit_code"])


def view(
    root: Annotated[Path, typer.Argument(help="Folder that holds runs, or one run.")] = Path(
        "runs"
    ),
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open a browser on it.")] = False,
) -> None:
    """Show all runs as pages on 127.0.0.1 until Ctrl-C.

    Learning, evaluation, training, escalation, search trees and routing below ROOT, read anew on
    each visit: a run that goes on is followed, with its stage, pace and time left.
    """
    if not root.is_dir():
        raise ConfigError(
            f"there is no folder {str(root)!r}: give the folder that holds your runs, or make one "
            "with tfgrpo learn CONFIG.toml"
        )
    from tfgrpo.report.served import serve_all

    _show(serve_all(root, port), open_)


def advise(
    run: _Run,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    level: Annotated[float, typer.Option(help="Level of the intervals.")] = 0.90,
) -> None:
    """Say which lever pays next, from the groups already paid for."""
    if not 0 < level < 1:
        raise ConfigError(f"--level {level!r} is no probability: give one such as 0.9")
    if _is_training(run):
        raise ConfigError(
            f"{str(run)!r} is a training run, on which no lever is ranked: tfgrpo report {run} "
            "writes its page"
        )
    found_view = load_view(run, shown=0)
    found = advise_on(found_view, level=level)
    if as_json:
        typer.echo(json.dumps([a.to_dict() for a in found], indent=1))
        return
    outcome = found_view.outcome
    typer.echo(printable(f"{outcome.state}: {outcome.reason}" if outcome.reason else outcome.state))
    for rank, advice in enumerate(found, 1):
        gain = f"  {advice.gain}" if advice.gain else ""
        typer.echo(printable(f"{rank}. {advice.headline}  [{advice.kind}]{gain}"))
        typer.echo(printable(f"   {advice.evidence}"))
        typer.echo(printable(f"   cost: {advice.cost}"))
        if advice.command:
            typer.echo(printable(f"   $ {advice.command}"))


def _render(
    run: Path, format: Format, rule: VerdictRule | None, level: float
) -> tuple[str, dict[str, Any]]:
    from tfgrpo.report.summary import summarise  # numpy is loaded only where figures are made

    view = load_view(run) if format is Format.html else load_view(run, shown=0)
    summary = summarise(view, rule=rule, level=level)
    verdict: dict[str, Any] = summary["verdict"]
    if format is Format.json:
        return json.dumps(summary, indent=1, allow_nan=False) + "\n", verdict
    if format is Format.junit:
        return str(verdict["junit"]) + "\n", verdict
    if format is Format.md:
        from tfgrpo.report.markdown import render_markdown

        return render_markdown(summary), verdict
    from tfgrpo.report.page import render_page

    return render_page(view, summary), verdict


def _is_training(run: Path) -> bool:
    return not is_run(run) and (run / "metrics.jsonl").exists()


def _report_training(run: Path, out: Path | None, format: Format) -> None:
    """Write the page of a training run, which has no other form."""
    if format is not Format.html:
        raise ConfigError(
            f"{str(run)!r} is a training run: it has a page, and its figures are the JSON lines of "
            "metrics.jsonl; leave --format out"
        )
    from tfgrpo.report.served.training import load_training, render_training

    page = render_training(load_training(run))
    if str(out) == "-":
        sys.stdout.write(printable(page))
        return
    target = out or run / "report.html"
    _write(target, page)
    typer.echo(str(target))


def _write(target: Path, text: str) -> None:
    """Write a file whole or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_for_people(target, text)
    except OSError as exc:
        raise StoreError(
            f"cannot write {str(target)!r}: {exc.strerror}; choose another --out"
        ) from exc


def _serve(run: Path, port: int) -> None:
    from tfgrpo.report.served import serve_live

    _show(serve_live(run, port), False)


def _show(server: LiveServer, is_opened: bool) -> None:
    with server:
        typer.echo(server.url)
        typer.echo("Ctrl-C stops it", err=True)
        if is_opened:
            webbrowser.open(server.url)
        server.wait()
