"""Every extra has a script that uses it; `make extras` runs them."""

from __future__ import annotations

import ast

import pytest

from tests.extras.__main__ import NOT_FEATURES, SCRIPTS, bare_environment, extras, main, told
from tfgrpo.runtime.syntax import syntax_tree


def scripts() -> set[str]:
    return {
        p.stem for p in SCRIPTS.glob("*.py") if not p.stem.startswith(("_", "test_", "conftest"))
    }


def test_every_extra_has_a_script_and_every_script_an_extra() -> None:
    assert scripts() == set(extras())
    assert not set(NOT_FEATURES) & set(extras())


@pytest.mark.parametrize("name", sorted(scripts()))
def test_a_script_says_what_it_shows_and_uses_nothing_of_the_tests(name: str) -> None:
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    assert ast.get_docstring(syntax_tree(text))
    assert "tests" not in text
    assert told(SCRIPTS / f"{name}.py", "skip") or "assert " in text


def test_a_bare_environment_has_empty_places_and_no_path_to_the_checkout(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("TFGRPO_SHARED", "/elsewhere")
    found = bare_environment(tmp_path)
    assert not {"PYTHONPATH", "TFGRPO_SHARED"} & found.keys()
    for name in ("HOME", "XDG_CACHE_HOME", "TFGRPO_CACHE"):
        assert found[name].startswith(str(tmp_path))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_an_unknown_extra_is_refused(capsys) -> None:
    assert main(["nothing-of-ours"]) == 2
    assert "nothing-of-ours" in capsys.readouterr().out
