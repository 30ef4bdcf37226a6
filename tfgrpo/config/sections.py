"""Sections of a config: reading TOML, overrides, and mistakes explained by the nearest known key.

Does not know which settings exist. Source: own.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.json_text import shown


class Section(BaseModel):
    """Base of every section: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def load_toml(path: Path | str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of a TOML file with `section.key=value` overrides applied.

    Raises:
        ConfigError: the file is absent, cannot be read or is not TOML, or an override is wrong.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(
            f"no config file {str(path)!r}: give one that is there; `tfgrpo init` writes one for "
            "learning to start from"
        ) from None
    except OSError as exc:
        raise ConfigError(
            f"config file {str(path)!r} cannot be read: {exc.strerror}; give the path of a TOML "
            "file"
        ) from exc
    except (ValueError, RecursionError) as exc:  # also a whole number of 5,000 digits
        raise ConfigError(f"{str(path)!r} is not TOML: {exc}") from exc
    for override in overrides:
        apply_override(values, override)
    if key := _key_with_nul(values):
        raise ConfigError(f"{str(path)!r}: {key} holds a NUL character (\\u0000): take it out")
    return values


def _key_with_nul(value: Any, key: str = "") -> str:
    """Return where a text holds a NUL, which no path, key or request can carry; empty for none."""
    if isinstance(value, str):
        return key if "\0" in value else ""
    inner = dict(enumerate(value)) if isinstance(value, list) else value
    rows = inner.items() if isinstance(inner, dict) else ()
    found = (_key_with_nul(item, f"{key}.{name}".lstrip(".")) for name, item in rows)
    return next(filter(None, found), "")


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set `section.key=value` in nested values; a value is TOML, else a text.

    Raises:
        ConfigError: no `=`, or a section that is a value.
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        value = text
    *sections, last = key.strip().split(".")
    place = values
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ConfigError(f"override {override!r}: {section!r} is not a section")
    place[last] = value


_SIGNS: Mapping[str, tuple[str, ...]] = {
    "train": ("model", "rollout", "optimiser", "loss", "engine", "curriculum", "credit"),
    "serve": ("serve", "upstreams", "routes", "keys"),
    "search": ("search", "world", "output"),
    "learn": ("learn", "gate", "policy", "critic", "practice", "nudge"),
}
"""Sections that only the settings of one verb have."""


def verb_of(values: Mapping[str, Any]) -> str:
    """Return the verb whose settings these look like; empty where nothing tells.

    >>> verb_of({"optimiser": {}, "model": {}}), verb_of({"run": {}})
    ('train', '')
    """
    counts = {verb: sum(name in values for name in names) for verb, names in _SIGNS.items()}
    best = max(counts, key=lambda verb: counts[verb])
    return best if counts[best] else ""


def wrong_verb(values: Mapping[str, Any], verb: str, source: str) -> str:
    """Return a line that names the verb whose settings a file holds; empty where it is this one."""
    found = verb_of(values)
    if found in ("", verb):
        return ""
    return f"{source} looks like settings of another verb: tfgrpo {found} {source}\n"


def resolve_fleets(values: Mapping[str, Any], folder: Path) -> None:
    """Make files of servers, `[fleets.NAME] servers = "FILE"`, relative to a config's folder."""
    fleets = values.get("fleets")
    for fleet in fleets.values() if isinstance(fleets, dict) else ():
        servers = fleet.get("servers") if isinstance(fleet, dict) else None
        if isinstance(servers, str) and servers and "://" not in servers:
            fleet["servers"] = str(folder / servers)


def explain(exc: ValidationError, model: type[BaseModel], source: str) -> str:
    """Return one line per mistake: key, value, what is allowed, the nearest known key."""
    lines = []
    for error in exc.errors(include_url=False):
        key = ".".join(str(part) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            lines.append(f"{source}: unknown key {key!r}{_nearest(error['loc'], model)}")
        elif error["type"] == "missing":
            lines.append(f"{source}: {key} is missing")
        else:
            lines.append(f"{source}: {key} = {shown(error['input'], 200)}: {error['msg']}")
    return "\n".join(lines)


def _nearest(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    known: type[BaseModel] | None = model
    for part in loc[:-1]:
        field = known.model_fields.get(str(part)) if known is not None else None
        if field is not None:  # else a name in a table of sections, such as a route's
            known = _section_in(field.annotation)
    return f"; {nearest_of(str(loc[-1]), known.model_fields)}" if known is not None else ""


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section that an annotation is, or holds in a table, a list or an alternative."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(inner) for inner in get_args(annotation))
    return next((section for section in found if section is not None), None)


def nearest_of(name: str, known: Iterable[str]) -> str:
    """Return "did you mean …?" for the nearest known name, else the list of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"


def check_names(given: Mapping[str, Any], record: type, where: str) -> None:
    """Check that every key of `given` is a field of the dataclass `record`.

    Raises:
        ConfigError: an unknown key, with the nearest known one.
    """
    names = sorted(f.name for f in fields(record))
    for key in given:
        if key not in names:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest_of(key, names)}")
