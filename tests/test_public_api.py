"""What is public: `__all__` is what is exposed, everything has a docstring, signatures are pinned.

A changed signature is a decision: write the file again with `python -m tests.test_public_api`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfgrpo
from tfgrpo.runtime.syntax import syntax_tree

SIGNATURES = Path(__file__).parent / "public_signatures.txt"
MOST_ROOT_NAMES = 30


def packages() -> list[str]:
    """The root and its sub-packages."""
    found = pkgutil.walk_packages(tfgrpo.__path__, "tfgrpo.")
    return ["tfgrpo", *(info.name for info in found if info.ispkg)]


def listed(package: str) -> list[str]:
    return list(getattr(importlib.import_module(package), "__all__", ()))


def exposed(package: str) -> set[str]:
    """Names without underscore that were put there on purpose: no sub-modules, no annotations."""
    module = importlib.import_module(package)
    lazy = getattr(module, "_HOME", {})
    plain = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", package).startswith("tfgrpo")
        and name not in lazy
    }
    return plain - {"TYPE_CHECKING"} | set(lazy)


@pytest.mark.parametrize("package", packages())
def test_all_is_what_is_exposed(package: str) -> None:
    names = listed(package)
    assert len(names) == len(set(names))
    assert exposed(package) - set(names) == set()
    module = importlib.import_module(package)
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", packages())
def test_every_public_name_loads_and_has_a_docstring(package: str) -> None:
    module = importlib.import_module(package)
    assert (module.__doc__ or "").strip(), f"{package} says nothing about itself"
    for name in listed(package):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            text = inspect.getdoc(value) or ""
            assert text, f"{package}.{name} has no docstring"
            assert not text.startswith(f"{name}("), f"{package}.{name} has a generated docstring"


@pytest.mark.parametrize("package", packages())
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module(package).no_such_name  # noqa: B018


@pytest.mark.parametrize("package", packages())
def test_no_lazy_name_is_that_of_a_module_which_would_stand_in_for_it(package: str) -> None:
    module = importlib.import_module(package)
    inside = {info.name for info in pkgutil.iter_modules(module.__path__)}
    assert set(getattr(module, "_HOME", {})) & inside == set()


def test_the_root_stays_small() -> None:
    assert len(tfgrpo.__all__) <= MOST_ROOT_NAMES


def test_no_package_imports_by_star() -> None:
    for folder in ("tfgrpo", "search", "rl", "routing", "prompts"):
        for path in (Path(__file__).parent.parent / folder).rglob("*.py"):
            imports = [n for n in ast.walk(syntax_tree(path.read_text("utf-8"))) if
                       isinstance(n, ast.ImportFrom)]  # fmt: skip
            assert not any(alias.name == "*" for n in imports for alias in n.names), path


def signature_of(value: object) -> str:
    if not callable(value):
        return f": {type(value).__name__}"
    try:
        text = str(inspect.signature(value))
    except (ValueError, TypeError):
        return ""
    text = re.sub(r" at 0x[0-9a-f]+", "", text).replace("'", "").replace('"', "")
    # A set has no order of its own.
    return re.sub(r"\{([^{}]*)\}", lambda m: "{" + ", ".join(sorted(m[1].split(", "))) + "}", text)


def lines_of(package: str) -> Iterator[str]:
    module = importlib.import_module(package)
    for name in sorted(listed(package)):
        value = getattr(module, name)
        yield f"{package}.{name}{signature_of(value)}"
        if not inspect.isclass(value):
            continue
        for method, member in sorted(vars(value).items()):
            if method.startswith("_"):
                continue
            if isinstance(member, property):
                yield f"{package}.{name}.{method}"
            elif isinstance(member, (classmethod, staticmethod)):
                yield f"{package}.{name}.{method}{signature_of(member.__func__)}"
            elif inspect.isfunction(member):
                yield f"{package}.{name}.{method}{signature_of(member)}"


@pytest.mark.parametrize("package", packages())
def test_signatures_change_on_purpose_only(package: str) -> None:
    kept = [
        line
        for line in SIGNATURES.read_text(encoding="utf-8").splitlines()
        if re.match(rf"{re.escape(package)}\.\w+", line)
        and package == max((p for p in packages() if line.startswith(p + ".")), key=len)
    ]
    assert list(lines_of(package)) == kept, (
        "a public signature changed; if that is meant: python -m tests.test_public_api"
    )


if __name__ == "__main__":
    rows = [line for package in packages() for line in lines_of(package)]
    SIGNATURES.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(rows)} signatures in {SIGNATURES}")
