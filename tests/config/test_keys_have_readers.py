"""Every config key is read by something, and one that nothing knows is refused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pydantic
import pytest

from tests.config.test_message_keys import CONFIGS, models_in, sources
from tfgrpo.runtime.syntax import syntax_tree


def sections(model: type[pydantic.BaseModel]) -> Iterator[type[pydantic.BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for inner in models_in(field.annotation):
            yield from sections(inner)


@cache
def read_names() -> frozenset[str]:
    """Attributes and texts of the package, outside the declarations of the fields."""
    names: set[str] = set()
    for path in sources():
        for node in ast.walk(syntax_tree(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if node.value.isidentifier():
                    names.add(node.value)
            elif (isinstance(node, ast.keyword) and node.arg) or isinstance(node, ast.arg):
                names.add(node.arg)
    return frozenset(names)


MODELS = sorted({m for c in CONFIGS for m in sections(c)}, key=lambda m: m.__module__ + m.__name__)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.__module__}.{m.__name__}")
def test_every_key_is_read_somewhere(model: type[pydantic.BaseModel]) -> None:
    assert sorted(set(model.model_fields) - read_names()) == []


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.__module__}.{m.__name__}")
def test_a_key_that_nothing_knows_is_refused(model: type[pydantic.BaseModel]) -> None:
    with pytest.raises(pydantic.ValidationError, match="a_key_of_nobody"):
        model.model_validate({"a_key_of_nobody": 1})
