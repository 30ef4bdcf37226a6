"""Every config key that a message names exists."""

from __future__ import annotations

import ast
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest

import tfgrpo
from tfgrpo.config.learn import Config
from tfgrpo.rl.config import TrainConfig
from tfgrpo.runtime.syntax import syntax_tree
from tfgrpo.search.config import SearchConfig

ROOT = Path(tfgrpo.__file__).parent
CONFIGS: tuple[type[pydantic.BaseModel], ...] = (Config, TrainConfig, SearchConfig)


def sources() -> Iterator[Path]:
    """Every file of the package, behind links to folders too."""
    for folder, _, names in os.walk(ROOT, followlinks=True):
        yield from (Path(folder) / name for name in names if name.endswith(".py"))


def models_in(hint: object) -> Iterator[type[pydantic.BaseModel]]:
    if isinstance(hint, type) and issubclass(hint, pydantic.BaseModel):
        yield hint
    for part in typing.get_args(hint):
        yield from models_in(part)


def keys_of(model: type[pydantic.BaseModel]) -> dict[str, set[str]]:
    """Section to its keys, over nested sections; a free mapping allows any key."""
    found: dict[str, set[str]] = {}
    for name, field in model.model_fields.items():
        for inner in models_in(field.annotation):
            found.setdefault(name, set()).update(inner.model_fields)
            for section, keys in keys_of(inner).items():
                found.setdefault(section, set()).update(keys)
        if "dict" in str(field.annotation).lower() or "Any" in str(field.annotation):
            found.setdefault(name, set()).add("*")
    return found


def known() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for config in CONFIGS:
        for section, keys in keys_of(config).items():
            found.setdefault(section, set()).update(keys)
    return found


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Texts that are raised, logged or warned of: f-strings and literals inside calls."""
    tree = syntax_tree(path.read_text("utf-8"))
    for node in ast.walk(tree):
        calls = [node.exc] if isinstance(node, ast.Raise) and node.exc is not None else []
        told = ("warning", "error", "info", "append", "echo")
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in told:
            calls.append(node)
        for call in calls:
            for part in ast.walk(call):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


SETS = re.compile(r"(?<![\w./])([a-z]+)\.([a-z_]+)(?= =|=)")
"""A key with its section where a message sets it: `learn.entries = "exemplars"`."""


def named(text: str) -> list[tuple[str, str]]:
    return [(m[1], m[2]) for m in SETS.finditer(text)]


def test_every_key_that_a_message_tells_people_to_set_exists() -> None:
    sections = known()
    assert {"learn", "policy", "tasks", "search"} <= set(sections)
    wrong, seen = [], 0
    for path in sources():
        for line, text in messages(path):
            for section, key in named(text):
                if section not in sections:
                    continue
                seen += 1
                if key not in sections[section] and "*" not in sections[section]:
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {section}.{key}")
    assert wrong == []
    assert seen > 0


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('set learn.entries = "exemplars"', [("learn", "entries")]),
        ("raise run.timeout_s=60 or so", [("run", "timeout_s")]),
        ("tfgrpo.lm.server == x", []),
    ],
)
def test_keys_are_found_in_messages(text: str, keys: list[tuple[str, str]]) -> None:
    assert named(text) == keys
