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
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from tfgrpo.config.learn import Config
from tfgrpo.errors import TfgrpoError
from tfgrpo.learning.learn import dry_run, learn_async
from tfgrpo.learning.progress import NotedView, QuietView, choose_view
from tfgrpo.runtime.import_string import add_module_folder, note_config
from tfgrpo.runtime.terminal import printable

if TYPE_CHECKING:
    from tfgrpo.experience import Artefact
    from tfgrpo.learning.evaluate import Evaluation
    from tfgrpo.learning.progress import ProgressView
    from tfgrpo.protocols import Allocator
    from tfgrpo.report.served import LiveServer
    from tfgrpo.sampling import Stop
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
        bool,
        typer.Option("--dry-run", help="Forecast calls, money and time; call nothing."),
    ] = False,
    fork: Annotated[
        bool,
        typer.Option(
            "--fork",
            help="After changed settings: a new run, with what still fits.",
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    ui: Annotated[
        bool, typer.Option("--ui", help="Serve the page on 127.0.0.1, until Ctrl-C.")
    ] = False,
) -> None:
    """Learn an experience library and prove what it is worth."""
    from tfgrpo.cli.result_lines import result_lines
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

    def spent() -> str:
        return spent_words(opened[0]) if opened else ""

    def on_open(store: Journal) -> None:
        opened.append(store)
        note_config(store.folder, config)  # a run that is stopped is gone on with, too
        view.note_in(store.folder)

    view = NotedView(QuietView() if quiet else choose_view(spent), spent)
    server = _serve(settings, view) if ui else None
    with view, json_of_failures(as_json, {"verdict": None}):
        result = _interruptible(
            lambda: learn_async(
                settings,
                fork=fork,
                view=view,
                stop=stop,
                on_open=on_open,
                allocate=_allocator(settings),
            ),
            stop,
            view,
        )
    typer.echo(
        json.dumps(result.to_dict()) if as_json else "\n".join(result_lines(result, str(config)))
    )
    if server is not None:
        _stay(server)
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


class Split(StrEnum):
    """Which tasks `eval` scores."""

    untaught = "untaught"
    all = "all"
    practice = "practice"
    gate = "gate"
    test = "test"


def evaluate(
    config: ConfigPath,
    library: Annotated[Path, typer.Argument(help="A run, an artefact's folder or library.json.")],
    set_: Override = None,
    group_size: Annotated[
        int, typer.Option(help="Attempts at each task, with and without the library.", min=1)
    ] = 4,
    split: Annotated[
        Split, typer.Option(help="Tasks to score; untaught leaves out what taught the library.")
    ] = Split.untaught,
    folder: Annotated[
        Path | None, typer.Option(help="The evaluation's own run; default run.folder + -eval.")
    ] = None,
    fork: Annotated[
        bool,
        typer.Option(
            "--fork",
            help="After changed settings: a new run, with what still fits.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score an exported library against the empty one on the config's tasks."""
    from tfgrpo.experience import load_artefact
    from tfgrpo.learning.evaluate import evaluate_async
    from tfgrpo.sampling import Stop
    from tfgrpo.store.postgres.places import place_of

    nothing: dict[str, Any] = {"empty": None, "library": None, "verdict": None, "notes": []}
    with json_of_failures(as_json, nothing):
        settings = Config.from_toml(config, set_ or ())
        add_module_folder(config.parent)
        where = place_of(library).folder
        artefact = load_artefact(where)
    if not artefact.library.shown:
        _nothing_to_compare(artefact, where, nothing if as_json else None)
    suffix = "-eval" if split is Split.untaught else f"-eval-{split.value}"
    place = str(folder) if folder is not None else settings.run.folder + suffix
    settings = settings.model_copy(
        update={"run": settings.run.model_copy(update={"folder": place})}
    )
    stop = Stop()
    opened: list[Journal] = []

    def spent() -> str:
        return spent_words(opened[0]) if opened else ""

    def on_open(store: Journal) -> None:
        opened.append(store)
        view.note_in(store.folder)

    view = NotedView(choose_view(spent), spent)
    with view, json_of_failures(as_json, nothing):
        done = _interruptible(
            lambda: evaluate_async(
                settings,
                artefact,
                group_size=group_size,
                split=split.value,
                fork=fork,
                view=view,
                stop=stop,
                on_open=on_open,
            ),
            stop,
            view,
        )
    typer.echo(json.dumps(_evaluation_row(done)) if as_json else "\n".join(_evaluation(done)))
    raise typer.Exit(done.verdict.exit_code if done.verdict is not None else 5)


def _nothing_to_compare(
    artefact: Artefact, where: Path, nothing: Mapping[str, Any] | None
) -> NoReturn:
    """Say that the empty library was kept, why, and what leads on; the verdict is not met."""
    why = next(iter(artefact.card.limits), "the library is empty")
    note = f"{str(where)!r} holds the empty library ({why}): there is nothing to compare"
    if nothing is not None:
        typer.echo(json.dumps({"schema": 1, **nothing, "notes": [note]}))
    else:
        typer.echo(printable(f"{note}\nnext: tfgrpo advise {where}"))
    raise typer.Exit(1)


@contextmanager
def json_of_failures(as_json: bool, nothing: Mapping[str, Any]) -> Iterator[None]:
    """Say on a failure which fields its JSON has, which `main` prints; print it for a stop.

    Args:
        as_json: False prints nothing.
        nothing: the fields that the result would have had, as null.
    """
    try:
        yield
    except TfgrpoError as exc:
        vars(exc)["json_fields"] = dict(nothing)
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


def _serve(settings: Config, view: ProgressView) -> LiveServer:
    from tfgrpo.report.served import serve_live

    server = serve_live(Path(settings.run.folder))
    view.say(f"live report: {server.url}")
    return server


def _stay(server: LiveServer) -> None:
    """Keep the page where a person looks at it: until Ctrl-C at a terminal, else not at all."""
    with server:
        if sys.stderr.isatty():
            typer.echo(f"the page stays at {server.url}; Ctrl-C ends it", err=True)
            with suppress(KeyboardInterrupt):
                server.wait()
        else:
            typer.echo("the page ends with this command; tfgrpo view shows all runs", err=True)


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


def _evaluation(done: Evaluation) -> list[str]:
    from tfgrpo.cli.result_lines import interval_words
    from tfgrpo.statistics import mean_interval

    lines = []
    for name, scores in (("empty library", done.empty), ("this library", done.library)):
        mean = mean_interval(scores) if any(scores.values()) else None
        if mean is not None and done.reward_range is not None:
            mean = mean.within(done.reward_range)
        lines.append(f"{name}: {interval_words(mean)}")
    lines.append(f"paired difference: {interval_words(done.difference)}")
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
