"""`tfgrpo learn CONFIG.toml` and `tfgrpo eval CONFIG.toml LIBRARY`.

One signal handler: the first Ctrl-C (or TERM) finishes what is in flight and writes, the second
leaves at once; both resume with the same command. Does not know the run. Source: own.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tfgrpo.config.learn import Config
from tfgrpo.errors import TfgrpoError
from tfgrpo.learning.learn import dry_run, learn_async
from tfgrpo.learning.progress import ProgressView, QuietView, choose_view
from tfgrpo.learning.result import Result
from tfgrpo.nudges import nudge_totals, total_lines
from tfgrpo.protocols import Allocator
from tfgrpo.runtime.import_string import add_module_folder, note_module_folder
from tfgrpo.runtime.redaction import redact
from tfgrpo.runtime.terminal import printable

if TYPE_CHECKING:
    from tfgrpo.learning.evaluate import Evaluation
    from tfgrpo.learning.progress import ProgressView
    from tfgrpo.learning.result import Result
    from tfgrpo.sampling import Stop
    from tfgrpo.statistics import Interval
    from tfgrpo.store import Journal

T = TypeVar("T")

ConfigPath = Annotated[Path, typer.Argument(help="TOML settings.")]
Override = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value over the file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def learn(
    config: ConfigPath,
    set_: Override = None,
    as_json: AsJson = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Forecast calls, tokens and money; call nothing.")
    ] = False,
    fork: Annotated[
        bool, typer.Option("--fork", help="Changed settings: a new run that reuses what fits.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    ui: Annotated[
        bool, typer.Option("--ui", help="Serve the report on 127.0.0.1 while running.")
    ] = False,
) -> None:
    """Learn an experience library and prove what it is worth."""
    from tfgrpo.sampling import Stop

    settings = Config.from_toml(config, set_ or ())
    add_module_folder(config.parent)
    if dry:
        plan, splits = dry_run(settings)
        sizes = ", ".join(f"{k} {len(v)}" for k, v in splits.to_dict().items())
        if as_json:
            typer.echo(json.dumps(plan.to_dict() | {"splits": splits.to_dict()}))
        else:
            typer.echo("\n".join([f"tasks: {sizes}", *plan.lines()]))
        return
    stop = Stop()
    opened: list[Journal] = []
    view = QuietView() if quiet else choose_view(lambda: spent_words(opened[0]) if opened else "")
    with view:
        if ui:
            _serve(settings, view)
        with json_of_failures(as_json, {"verdict": None}):
            result = _interruptible(
                lambda: learn_async(
                    settings,
                    fork=fork,
                    view=view,
                    stop=stop,
                    on_open=opened.append,
                    allocate=_allocator(settings),
                ),
                stop,
                view,
            )
    note_module_folder(result.folder, config.parent)
    typer.echo(json.dumps(result.to_dict()) if as_json else "\n".join(result_lines(result)))
    raise typer.Exit(result.exit_code)


def _allocator(settings: Config) -> Allocator | None:
    """What deals out the rollouts of a step, or None; raises as `open_allocator`."""
    learn = settings.learn
    if not learn.allocate:
        return None
    from tfgrpo.routing.budgets.factory import open_allocator

    return open_allocator(
        learn.allocate, learn.allocate_options, group_size=learn.group_size, where="learn.allocate"
    )


def evaluate(
    config: ConfigPath,
    library: Annotated[Path, typer.Argument(help="library.json, or the folder that holds it.")],
    set_: Override = None,
    group_size: Annotated[int, typer.Option(help="Draws a task and arm.", min=1)] = 4,
    as_json: AsJson = False,
) -> None:
    """Score an exported library against the empty one on the config's tasks."""
    from tfgrpo.experience import load_artefact
    from tfgrpo.learning.evaluate import evaluate_async
    from tfgrpo.sampling import Stop

    nothing: dict[str, Any] = {"empty": None, "library": None, "verdict": None, "notes": []}
    with json_of_failures(as_json, nothing):
        settings = Config.from_toml(config, set_ or ())
        add_module_folder(config.parent)
        artefact = load_artefact(library)
    folder = Path(settings.run.folder + "-eval")
    settings = settings.model_copy(
        update={"run": settings.run.model_copy(update={"folder": str(folder)})}
    )
    stop = Stop()
    opened: list[Journal] = []
    view = choose_view(lambda: spent_words(opened[0]) if opened else "")
    with view, json_of_failures(as_json, nothing):
        done = _interruptible(
            lambda: evaluate_async(
                settings,
                artefact,
                group_size=group_size,
                view=view,
                stop=stop,
                on_open=opened.append,
            ),
            stop,
            view,
        )
    typer.echo(json.dumps(_evaluation_row(done)) if as_json else "\n".join(_evaluation(done)))
    raise typer.Exit(done.verdict.exit_code if done.verdict is not None else 5)


@contextmanager
def json_of_failures(as_json: bool, nothing: Mapping[str, Any]) -> Iterator[None]:
    """Print one JSON object also where a command fails, so that who reads it never meets nothing.

    Args:
        as_json: False prints nothing.
        nothing: the fields that the result would have had, as null.
    """
    try:
        yield
    except TfgrpoError as exc:
        if as_json:
            error = {"type": type(exc).__name__, "message": redact(str(exc))}
            kind = getattr(exc, "kind", None)
            error |= {} if kind is None else {"kind": kind}
            typer.echo(json.dumps({"schema": 1, **nothing, "error": error}))
        raise
    except typer.Exit as exc:  # stopped by a signal
        if as_json:
            error = {"type": "Stopped", "message": f"stopped, exit code {exc.exit_code}"}
            typer.echo(json.dumps({"schema": 1, **nothing, "error": error}))
        raise


def spent_words(store: Journal) -> str:
    """Return what a run has spent so far, for its progress line."""
    spent = store.ledger.spent
    tokens = spent["prompt_tokens"] + spent["completion_tokens"]
    words = f"{spent['calls']:,.0f} calls, {tokens:,.0f} tokens"
    return f"{words}, ${spent['cost_usd']:.4f}" if spent["cost_usd"] else words


def _serve(settings: Config, view: ProgressView) -> None:
    from tfgrpo.report.live import serve_live

    server = serve_live(Path(settings.run.folder))
    view.say(f"live report: {server.url}")


def _interruptible(make: Callable[[], Coroutine[Any, Any, T]], stop: Stop, view: ProgressView) -> T:
    """Run a coroutine under the two-step signal handler; exits 130 or 143 when stopped."""
    from tfgrpo.sampling import Stopped

    caught: list[int] = []

    async def run() -> T:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            caught.append(number)
            if len(caught) == 1:
                stop.request()
                view.say("stopping: calls in flight finish and are kept; once more leaves at once")
            elif task is not None:
                task.cancel()

        if sys.platform != "win32":
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, on_signal, number)
        return await make()

    try:
        return asyncio.run(run())
    except Stopped as exc:
        view.say(f"{exc}; run the same command again to go on")
    except asyncio.CancelledError:
        view.say("left at once; what was finished is kept, run the same command again to go on")
    raise typer.Exit(143 if caught and caught[0] == signal.SIGTERM else 130)


def result_lines(result: Result) -> list[str]:
    """Return a result for people: scores, verdict, what was kept, what it cost."""

    learned = result.learned
    lines = [f"run: {result.folder}"]
    if learned.stopped_by:
        lines.append(f"ended early: {learned.stopped_by}")
    lines.extend(
        f"gate, step {look.step}, {look.what}: "
        f"{'accepted' if look.decision.accepted else 'rejected'}: {look.decision.reason}"
        for look in learned.looks
    )
    lines.extend(_what_helped(result))
    lines.append(f"choice on the gate split: {learned.choice.reason}")
    lines.append(f"kept: version {learned.version.version_id}")
    for entry in result.library.shown:
        body = printable(" ".join(entry.body.split()))
        lines.append(f"  {entry.experience_id} {entry.kind}: {body[:160]}")
    if learned.proof is not None:
        lines.append(f"test split, empty library: {_words(result.empty_score)}")
        lines.append(f"test split, kept library:  {_words(result.library_score)}")
        if learned.proof.difference is not None:
            lines.append(f"paired difference:         {_words(learned.proof.difference)}")
        if result.min_detectable is not None:
            lines.append(f"smallest effect the test could have seen: {result.min_detectable:.3f}")
        if learned.proof.noise_floor is not None:
            lines.append(f"A/A noise of such a comparison: {learned.proof.noise_floor:.3f}")
    if result.verdict is not None:
        lines.append(result.verdict.text)
    totals = nudge_totals(learned.nudges)
    lines.extend(total_lines(totals) if totals is not None else ())
    for stage, counts in result.outcomes.items():
        ended = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
        lines.append(f"rollouts of {stage}: {ended}")
    lines.extend(f"note: {note}" for note in result.notes)
    for row in result.spend:
        cost = "unknown" if row.usage.cost_usd is None else f"${row.usage.cost_usd:.4f}"
        mark = "≈" if row.usage.is_estimated else ""
        lines.append(
            f"spent: {row.stage:<10} {row.model}: {row.usage.calls} calls, "
            f"{mark}{row.usage.prompt_tokens} + {row.usage.completion_tokens} tokens, {cost}"
        )
    return lines


def _what_helped(result: Result) -> list[str]:
    """Say it when lessons were tried and did not help."""
    tried = [look for look in result.learned.looks if look.what in ("lessons", "one lesson")]
    if not tried or any(look.decision.accepted for look in tried):
        return []
    kept = {entry.kind for entry in result.library.shown}
    instead = ": worked examples did" if kept == {"exemplar"} else ""
    return [f"lessons did not help this model{instead}"]


def _words(interval: Interval | None) -> str:
    if interval is None:
        return "nothing was scored"
    return (
        f"{interval.estimate:.3f} ({interval.level:.0%} interval {interval.low:.3f} to "
        f"{interval.high:.3f}, {interval.n_tasks} tasks)"
    )


def _evaluation(done: Evaluation) -> list[str]:
    from tfgrpo.statistics import mean_interval

    lines = []
    for name, scores in (("empty library", done.empty), ("this library", done.library)):
        mean = mean_interval(scores) if any(scores.values()) else None
        lines.append(f"{name}: {_words(mean)}")
    lines.append(f"paired difference: {_words(done.difference)}")
    if done.verdict is not None:
        lines.append(done.verdict.text)
    lines.extend(f"note: {note}" for note in done.notes)
    return lines


def _evaluation_row(done: Evaluation) -> dict[str, Any]:
    return {
        "schema": 1,
        "empty": {t: list(r) for t, r in done.empty.items()},
        "library": {t: list(r) for t, r in done.library.items()},
        "verdict": None if done.verdict is None else done.verdict.to_dict(),
        "notes": list(done.notes),
    }
