"""`tfgrpo config show`: every setting of every verb, with a sentence, its value and its range.

What is printed is a config file that reads back as the same settings. Does not know what a setting
does. Source: own.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError

from tfgrpo.config.reference import Extra, Part, parts_of, schema_of, toml_value
from tfgrpo.config.sections import apply_override, explain, load_toml, verb_of
from tfgrpo.errors import ConfigError, MissingExtraError

__all__ = ["SCHEMA_URL", "VERBS", "config_app", "extra_of", "model_of"]

SCHEMA_URL = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class Verb:
    """Where the settings of a verb are."""

    model: str
    """`module:name` of the pydantic model."""
    title: str
    extra: str = ""
    """The extra that its module may need."""


VERBS: Mapping[str, Verb] = {
    "learn": Verb("tfgrpo.config.learn:Config", "`tfgrpo learn` and `tfgrpo eval`"),
    "train": Verb("tfgrpo.rl.config:TrainConfig", "`tfgrpo train`", "rl"),
    "search": Verb("tfgrpo.search.config:SearchConfig", "`tfgrpo search`"),
    "serve": Verb("tfgrpo.serve.settings:GatewaySettings", "`tfgrpo serve`"),
    "escalate": Verb("tfgrpo.escalate.settings:EscalateSettings", "Options of `tfgrpo escalate`"),
}


class Kind(StrEnum):
    """Whose settings are meant."""

    learn = "learn"
    train = "train"
    search = "search"
    serve = "serve"
    escalate = "escalate"


config_app = typer.Typer(no_args_is_help=True, help="Show settings, and what each means.")
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value over the file.")
]


@config_app.callback()
def _config() -> None:
    """Settings of a run."""


@config_app.command("show")
def config_show(
    path: Annotated[Path | None, typer.Argument(help="TOML settings; defaults without.")] = None,
    set_: Overrides = None,
    verb: Annotated[
        Kind | None, typer.Option("--for", help="Whose settings; told by the file where given.")
    ] = None,
    section: Annotated[
        str, typer.Option("--section", help="One section, such as gate or learn.settings.")
    ] = "",
    origin: Annotated[
        bool, typer.Option("--origin", help="One line a key, with where its value came from.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema.")] = False,
) -> None:
    """Print every setting with sentence, range and value."""
    from tfgrpo.runtime.redaction import redact

    raw = load_toml(path, set_ or ()) if path else _overridden(set_ or ())
    name = verb.value if verb is not None else verb_of(raw) or "learn"
    if schema:
        typer.echo(
            json.dumps(schema_of(model_of(name), f"tfgrpo {name}", extra_of(name)), indent=1)
        )
        return
    config = _checked(name, raw, str(path or "config"))
    values = config.to_json() if hasattr(config, "to_json") else config.model_dump(mode="json")
    if origin:
        for line in _origins(values, set_ or (), path):
            typer.echo(redact(line))
        return
    found = False
    for line in _lines(name, values, section):
        found = True
        typer.echo(redact(line))
    if section and not found:
        names = ", ".join(p.name for p in parts_of(model_of(name), "", extra_of(name)) if p.name)
        raise ConfigError(f"no section {section!r}; there are {names}")


def model_of(verb: str) -> type[BaseModel]:
    """Return the settings' model of a verb.

    Raises:
        MissingExtraError: its module needs a library that is not installed.
    """
    module, _, name = VERBS[verb].model.partition(":")
    try:
        found: type[BaseModel] = getattr(import_module(module), name)
    except ImportError as exc:
        if not VERBS[verb].extra:
            raise
        raise MissingExtraError.of(
            VERBS[verb].extra, f"settings of {verb}", exc.name or "torch"
        ) from exc
    return found


def extra_of(verb: str) -> Extra:
    """Return the tables that a verb's model leaves open, and their keys that are set elsewhere."""
    if verb != "learn":
        return Extra()
    from tfgrpo.experience import ExperienceSettings, Repairs
    from tfgrpo.learning.experience_settings import SET_ELSEWHERE

    hidden = frozenset(f"learn.settings.{key}" for key in SET_ELSEWHERE)
    return Extra({"learn.settings": ExperienceSettings, "repairs": Repairs}, hidden)


def _overridden(overrides: list[str] | tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for override in overrides:
        apply_override(values, override)
    return values


def _checked(verb: str, raw: Mapping[str, Any], source: str) -> Any:
    model: Any = model_of(verb)
    if verb == "search":
        raw = {"tasks": "tasks.jsonl", **raw}
    if hasattr(model, "from_mapping"):
        return model.from_mapping(raw, source)
    try:
        return model.model_validate(raw)
    except ValidationError as exc:
        raise ConfigError(explain(exc, model, source)) from None


def _lines(verb: str, values: dict[str, Any], section: str) -> Iterator[str]:
    """Yield a config file with a comment for each key."""
    if verb == "learn":
        values = _with_settings(values)
    for part in parts_of(model_of(verb), "", extra_of(verb)):
        if not part.keys or (section and f"{part.name}.".find(f"{section}.") != 0):
            continue
        if verb == "learn" and part.name.startswith("learn.settings") and not section:
            continue
        yield from _part_lines(part, values)
    if verb == "learn" and not section:
        yield "# Further settings of how groups become lessons: --section learn.settings"


def _with_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the preset's own values where `learn.settings` says nothing."""
    from tfgrpo.config.learn import Config
    from tfgrpo.learning.experience_settings import experience_settings

    made = _plain(experience_settings(Config.from_mapping(values)))
    learn = values["learn"] | {"settings": made}
    return values | {"learn": learn, "repairs": made["repairs"]}


def _plain(value: Any) -> Any:
    """Return a record of plain values as a table."""
    if not is_dataclass(value):
        return dict(value) if isinstance(value, Mapping) else value
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}


def _part_lines(part: Part, values: dict[str, Any]) -> Iterator[str]:
    places = _places(part.name, values)
    for name, given in places:
        mark = "" if given is not None else "# "
        yield from textwrap.wrap(part.sentence, 96, initial_indent="# ", subsequent_indent="# ")
        if name:
            yield f"{mark}[{name}]"
        for key in part.keys:
            words = f"{key.sentence} ({key.kind})"
            yield from textwrap.wrap(words, 96, initial_indent="# ", subsequent_indent="# ")
            value = None if given is None else given.get(key.name)
            if value is None:
                is_known = given is None and key.default not in ("unset", "required")
                yield f"# {key.name} = {key.default if is_known else ''}".rstrip()
            else:
                yield f"{mark}{key.name} = {toml_value(value)}"
        yield ""


def _places(name: str, values: dict[str, Any]) -> list[tuple[str, dict[str, Any] | None]]:
    """Return where a section stands, with its values: NAME stands for each name that is given."""
    places: list[tuple[str, Any]] = [("", values)]
    for step in filter(None, name.split(".")):
        found: list[tuple[str, Any]] = []
        for prefix, inner in places:
            dotted = f"{prefix}." if prefix else ""
            if step == "NAME":
                names = sorted(inner) if inner else []
                found += [(f"{dotted}{n}", inner[n]) for n in names] or [(f"{dotted}NAME", None)]
            else:
                below = inner.get(step) if isinstance(inner, dict) else None
                found.append((f"{dotted}{step}", below))
        places = found
    return places


def _origins(values: dict[str, Any], overrides: Any, path: Path | None) -> Iterator[str]:
    given: set[str] = set()
    if path is not None:
        given = {key for key, _ in _flat(load_toml(path))}
    forced = {entry.partition("=")[0].strip() for entry in overrides}
    for key, value in _flat(values):
        source = "command line" if key in forced else str(path) if key in given else "default"
        yield f"{key} = {json.dumps(value)}  # {source}"


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            rows.extend(_flat(value, f"{name}."))
        else:
            rows.append((name, value))
    return rows
