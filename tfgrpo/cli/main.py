"""The command line: verbs, exit codes, messages; the one place that wires the modules together.

Modules with commands of their own are loaded when their verb is used. Every command is one public
function with the same names; an error of ours becomes three short lines and an exit code, a
traceback only with `--debug`. Records go to standard output, everything else to standard error.

Exit codes: 0 done, verdict met · 1 verdict not met · 2 usage or config · 3 credentials or model ·
4 stopped by a cap · 5 inconclusive · 6 store, disk, lock or workers · 130 Ctrl-C · 143 TERM.

Does not know: what the verbs do. Source: own.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from importlib import import_module
from itertools import pairwise
from typing import Annotated

import typer

from tfgrpo.errors import (
    BudgetError,
    ConfigError,
    EditError,
    ExecutorError,
    MissingExtraError,
    PolicyError,
    ProviderError,
    StoreError,
    TfgrpoError,
    VerifierError,
    boundary,
)
from tfgrpo.runtime.openmp import bound_waiting
from tfgrpo.runtime.output import safe_output

_LAZY = {
    "learn": ("tfgrpo.cli.learn", "learn", "Learn an experience library from group rollouts."),
    "eval": ("tfgrpo.cli.learn", "evaluate", "Score a library against the empty one."),
    "init": ("tfgrpo.cli.start", "init", "Write a commented config, tasks and a verifier."),
    "doctor": ("tfgrpo.cli.start", "doctor", "Check the installation, keys and models."),
    "config": ("tfgrpo.cli.config", "config_app", "Show settings, and what each means."),
    "library": ("tfgrpo.cli.library", "app", "Show, compare and edit learnt libraries."),
    "runs": ("tfgrpo.cli.runs", "runs_app", "List and purge runs."),
    "export": ("tfgrpo.cli.runs", "export", "Write a run's groups as JSONL or Parquet."),
    "report": ("tfgrpo.cli.report", "report", "Write the report of a run."),
    "view": ("tfgrpo.cli.report", "view", "Show all runs as pages, until Ctrl-C."),
    "advise": ("tfgrpo.cli.report", "advise", "Say which lever pays next."),
    "models": ("tfgrpo.cli.models", "models", "List backends and known models."),
    "serve-model": ("tfgrpo.cli.models", "serve_model", "Offer a local model over HTTP."),
    "serve": ("tfgrpo.cli.serve", "app", "Serve libraries behind an OpenAI-compatible API."),
    "route": ("tfgrpo.cli.route", "app", "Route tasks to models by predicted success."),
    "search": ("tfgrpo.cli.search", "search_command", "Search tool plans."),
    "train": ("tfgrpo.cli.train", "train", "Train a model on groups."),
    "escalate": ("tfgrpo.cli.escalate", "escalate", "Train on what a run found; compare."),
    "handover": ("tfgrpo.cli.handover", "handover", "Write a run for another trainer."),
}


def build(arguments: list[str]) -> typer.Typer:
    """Return the program with the asked-for verb loaded and the others named only."""
    program = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    program.callback()(_root)
    asked = next((a for a in arguments if not a.startswith("-")), "")
    for verb, (module, name, summary) in _LAZY.items():
        if verb != asked:
            program.command(verb, help=summary)(_not_loaded)
            continue
        target = getattr(import_module(module), name)
        if isinstance(target, typer.Typer):
            program.add_typer(target, name=verb, help=summary)
        else:
            program.command(verb)(target)
    return program


def _not_loaded() -> None:
    """Stands for a verb that was not asked for: it appears in the help and never runs."""


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version as installed

        typer.echo(installed("tfgrpo"))
        raise typer.Exit


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print it.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """tfgrpo makes LLM agents better from a few dozen examples.

    Start with `tfgrpo init first`, then follow what each command prints; docs/start.md explains it.

    Exit codes: 0 done, verdict met; 1 verdict not met; 2 usage or config; 3 credentials or model;
    4 stopped by a cap; 5 inconclusive; 6 store, disk or lock; 130 Ctrl-C; 143 TERM.
    """
    from tfgrpo.runtime.redaction import RedactingFilter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(RedactingFilter())
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler])
    # A model that is unpacked once makes a stranger wait: one line says for what.
    logging.getLogger("tfgrpo.lm").setLevel(logging.DEBUG if debug else logging.INFO)


_CODES: tuple[tuple[type[TfgrpoError], int], ...] = (
    (ConfigError, 2),
    (EditError, 2),
    (MissingExtraError, 2),
    (BudgetError, 4),
    (VerifierError, 5),
    (PolicyError, 5),
    (StoreError, 6),
    (ExecutorError, 6),
)


def exit_code_of(error: TfgrpoError) -> int:
    """Return the exit code that an error ends the program with."""
    if isinstance(error, ProviderError):
        return 3 if error.is_fatal else 5
    return next((code for kind, code in _CODES if isinstance(error, kind)), 5)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; always leaves through `SystemExit`."""
    with safe_output():
        _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: list[str]) -> None:
    debug, as_json = "--debug" in arguments, _is_json_asked(arguments)
    try:
        # A crash would end with 1, which means "verdict not met", and print what may hold a key.
        with boundary(TfgrpoError, "a bug of ours, or of code that the settings name"):
            build(arguments)(args=arguments, prog_name="tfgrpo")
    except TfgrpoError as error:
        if as_json:
            _print_json_of(error)
        raise SystemExit(_report(error, debug=debug)) from None
    except KeyboardInterrupt:
        if as_json:
            _print_json_of(TfgrpoError("interrupted: run the same command again to go on"))
        print("interrupted: run the same command again to go on", file=sys.stderr)
        raise SystemExit(130) from None
    except SystemExit as ended:
        if as_json and ended.code == 2:  # typer has refused the arguments, in words
            _print_json_of(ConfigError("the command's arguments are wrong; see standard error"))
        raise


def _is_json_asked(arguments: list[str]) -> bool:
    """Return whether a program reads what is printed: `--json`, or `--format json`."""
    pairs = set(pairwise(arguments))
    asked = {"--json", "--format=json", "-fjson"} & set(arguments)
    return bool(asked or pairs & {("--format", "json"), ("-f", "json")})


def _print_json_of(error: TfgrpoError) -> None:
    """Print one JSON object where a command that was asked for JSON fails: its reader never meets
    nothing."""
    from tfgrpo.runtime.redaction import redact

    told = {"type": type(error).__name__, "message": redact(str(error))}
    kind = getattr(error, "kind", None)
    told |= {} if kind is None else {"kind": kind}
    fields = vars(error).get("json_fields", {"verdict": None})
    print(json.dumps({"schema": 1, **fields, "error": told}))


def run_program() -> None:
    """The command `tfgrpo`: the exit code holds even where a tool or verifier hangs in a thread."""
    bound_waiting()
    try:
        main()
    except SystemExit as exc:
        if "tfgrpo.runtime.user_code" not in sys.modules:  # no verb called code of others
            raise
        from tfgrpo.runtime.user_code import end_process, is_any_running

        if not is_any_running():
            raise
        end_process(exc.code if isinstance(exc.code, int) else int(exc.code is not None))


def _report(error: TfgrpoError, *, debug: bool) -> int:
    from tfgrpo.runtime.redaction import redact
    from tfgrpo.runtime.terminal import printable

    code = exit_code_of(error)
    if debug:
        print(redact("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    print(f"error: {printable(redact(str(error)))}", file=sys.stderr)
    cause = error.__cause__
    if cause is not None and str(cause) and str(cause) not in str(error):
        print(f"cause: {type(cause).__name__}: {printable(redact(str(cause)))}", file=sys.stderr)
    print(f"exit {code} ({_meaning(error, code)}); --debug shows the traceback", file=sys.stderr)
    return code


_MEANING = {
    2: "usage or config",
    3: "credentials or model; `tfgrpo models --check SPEC` makes one short call",
    4: "stopped by a cap, finished work is kept; with a larger cap the same command goes on",
    5: "inconclusive: too little could be scored; the same command goes on",
    6: "store, disk, lock or workers; `tfgrpo runs list` shows the runs here",
}


def _meaning(error: TfgrpoError, code: int) -> str:
    """Say what an exit code stands for, and what leads on."""
    if isinstance(error, ProviderError) and not error.is_fatal:
        return (
            "no answer could be had; `tfgrpo models --check SPEC` makes one short call, the same "
            "command goes on"
        )
    if type(error) is TfgrpoError:
        return "unexpected; --debug shows where"
    return _MEANING[code]
