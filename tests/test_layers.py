"""Who imports whom, what a bare `import tfgrpo` costs, and what the search core stands on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tfgrpo
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent

HEAVY = {
    *("torch", "transformers", "numpy", "scipy", "openai", "httpx", "aiohttp", "litellm"),
    *("jsonschema", "referencing", "pydantic"),
}

_LOADED = """
import json, socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("the network was used")
socket.socket.connect = socket.getaddrinfo = refuse
before = set(sys.modules)
import importlib
for name in NAMES:
    module, _, attribute = name.partition(":")
    value = importlib.import_module(module)
    if attribute:
        getattr(value, attribute)
print(json.dumps(sorted(set(sys.modules) - before)))
"""

# `tfgrpo.search` without the parts that ask an LM, a tool server or a settings file.
SEARCH_CORE = (
    "node", "tree", "state", "driver", "plan_memory", "groups", "event_log", "api",
    "environments.protocol", "proposers.expander", "scorers.scorer", "scorers.toolchain",
    *(f"algorithms.{name}" for name in (
        "protocol", "astar", "beam", "best_of_n", "depth_first", "mcts", "ab_mcts", "tree_rollouts",
    )),
)  # fmt: skip


def loaded_by(*names: str, home: Path) -> list[str]:
    """Modules that a fresh interpreter loads for these imports (`module` or `module:name`), run in
    an empty home."""
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-B", "-c", f"NAMES = {list(names)!r}\n{_LOADED}"],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stdout)
    return loaded


def third_party(modules: list[str]) -> set[str]:
    roots = {name.partition(".")[0] for name in modules}
    return {r for r in roots if r not in sys.stdlib_module_names and r != "tfgrpo"}


def test_imports_point_one_way() -> None:
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", script, "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_architecture_page_names_every_module_of_the_contract() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for layer in tool["importlinter"]["contracts"][0]["layers"]:
        for name in layer.split(" | "):
            assert name.startswith("__") or f"`{name}`" in page, name


def test_importing_the_package_loads_nothing_but_itself(tmp_path: Path) -> None:
    loaded = loaded_by("tfgrpo", home=tmp_path)
    assert third_party(loaded) == set()
    assert [name for name in loaded if name.startswith("tfgrpo.")] == []
    assert len(loaded) < 40


def test_importing_every_core_record_loads_no_third_party_module(tmp_path: Path) -> None:
    names = ("rollout", "protocols", "context", "errors", "messages")
    names += ("runtime.canonical", "runtime.call_scope")
    loaded = loaded_by(*(f"tfgrpo.{name}" for name in names), home=tmp_path)
    assert third_party(loaded) == set()


def test_importing_the_package_writes_no_file(tmp_path: Path) -> None:
    loaded_by("tfgrpo", "tfgrpo.learning.learn", "tfgrpo.cli.learn", home=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_starts_without_models_or_modules(tmp_path: Path) -> None:
    loaded = loaded_by("tfgrpo.cli.main", home=tmp_path)
    assert third_party(loaded) & HEAVY == set()
    modules = ("tfgrpo.search", "tfgrpo.rl", "tfgrpo.routing", "tfgrpo.experience")
    assert [name for name in loaded if name.startswith(modules)] == []


def test_the_help_loads_no_command_and_no_library_but_that_of_the_command_line(
    tmp_path: Path,
) -> None:
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-B", "-X", "importtime", "-m", "tfgrpo", "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0 and "escalate" in done.stdout
    rows = [line.split("|") for line in done.stderr.splitlines() if line.startswith("import time:")]
    loaded = [row[-1].strip() for row in rows]
    assert "tfgrpo.cli.main" in loaded
    assert third_party(loaded) & HEAVY == set()
    assert [m for m in loaded if m.startswith("tfgrpo.cli.")] == ["tfgrpo.cli.main"]
    assert not {"asyncio", "sqlite3", "tfgrpo.config.learn"} & set(loaded)


def test_the_verbs_and_records_of_the_root_load_no_numerics_and_no_client(tmp_path: Path) -> None:
    loaded = loaded_by(*(f"tfgrpo:{name}" for name in tfgrpo.__all__), home=tmp_path)
    assert third_party(loaded) & (HEAVY - {"pydantic"}) == set()
    assert "tfgrpo.store.journal" in loaded  # `evaluate` and `sample_group` are whole


def test_the_verb_learn_is_there_before_its_parts(tmp_path: Path) -> None:
    loaded = loaded_by("tfgrpo:learn", "tfgrpo:Config", home=tmp_path)
    parts = ("learning.loop", "sampling", "store.journal", "experience.library", "verifiers.exact")
    assert {f"tfgrpo.{part}" for part in parts} & set(loaded) == set()


def test_learning_and_evaluating_load_no_module_beside_the_core(tmp_path: Path) -> None:
    loaded = loaded_by("tfgrpo.learning.learn", "tfgrpo.learning.evaluate", home=tmp_path)
    modules = ("tfgrpo.search", "tfgrpo.rl", "tfgrpo.routing")
    assert [name for name in loaded if name.startswith(modules)] == []
    assert third_party(loaded) & {"torch", "transformers", "litellm", "vllm", "openai"} == set()


@pytest.mark.parametrize("part", SEARCH_CORE)
def test_the_list_of_the_search_core_names_real_modules(part: str) -> None:
    assert (ROOT / "search" / f"{part.replace('.', '/')}.py").is_file()


def test_the_search_core_needs_the_standard_library_only(tmp_path: Path) -> None:
    loaded = loaded_by(*(f"tfgrpo.search.{part}" for part in SEARCH_CORE), home=tmp_path)
    assert third_party(loaded) == set()


def test_the_fault_server_and_scripted_models_need_the_standard_library_only(
    tmp_path: Path,
) -> None:
    assert third_party(loaded_by("tfgrpo.testing", home=tmp_path)) == set()


def test_hint_schedulers_load_no_torch(tmp_path: Path) -> None:
    folder = ROOT / "tfgrpo" / "hints"
    names = [f"tfgrpo.hints.{p.stem}" for p in folder.glob("*.py") if p.stem != "__init__"]
    loaded = loaded_by("tfgrpo.hints", *names, home=tmp_path)
    assert "torch" not in third_party(loaded)
