"""What is shipped: every package and data file, one root, and nothing that a user's names break."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
LINKED = ("prompts", "rl", "routing", "search")
IGNORED_SUFFIXES = (".py", ".pyc")


def settings() -> dict[str, object]:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    found: dict[str, object] = tool["setuptools"]
    return found


def source_folders() -> dict[str, Path]:
    """Package name to real folder, links not followed."""
    found: dict[str, Path] = {}
    for root, name in [("tfgrpo", "tfgrpo"), *((n, f"tfgrpo.{n}") for n in LINKED)]:
        for init in sorted((ROOT / root).rglob("__init__.py")):
            parts = init.parent.relative_to(ROOT / root).parts
            is_linked_copy = root == "tfgrpo" and parts[:1] and parts[0] in LINKED
            if not is_linked_copy:
                found[".".join((name, *parts))] = init.parent
    return found


def test_the_list_of_packages_is_the_folders_there_are() -> None:
    packages = settings()["packages"]
    assert isinstance(packages, list)
    assert sorted(packages) == sorted(source_folders())


def test_every_folder_with_modules_is_a_package() -> None:
    packages = set(source_folders().values())
    for root in ("tfgrpo", *LINKED):
        for module in (ROOT / root).rglob("*.py"):
            if not any((ROOT / "tfgrpo" / name) in module.parents for name in LINKED):
                assert module.parent in packages, module


def test_every_data_file_of_a_package_is_shipped() -> None:
    data = settings()["package-data"]
    assert isinstance(data, dict)
    patterns = data["*"]
    for folder in source_folders().values():
        for path in folder.iterdir():
            if path.is_file() and path.suffix not in IGNORED_SUFFIXES:
                assert any(fnmatch.fnmatch(path.name, p) for p in patterns), path


@pytest.mark.parametrize("name", LINKED)
def test_each_link_in_the_package_leads_to_its_folder(name: str) -> None:
    link = ROOT / "tfgrpo" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == (ROOT / name).resolve()


def test_a_module_and_its_linked_twin_are_one_class_under_one_name() -> None:
    from tfgrpo.search import Node

    assert Node.__module__ == "tfgrpo.search.node"
    assert "search" not in sys.modules


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built offline from a copy without links to build folders."""
    pytest.importorskip(
        "setuptools", reason="building offline needs setuptools in this environment"
    )
    source = tmp_path_factory.mktemp("source")
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "tfgrpo", *LINKED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if names.returncode != 0:
        pytest.skip("the list of source files needs a git checkout")
    for name in [*names.stdout.split("\n"), "pyproject.toml", "README.md", "LICENSE"]:
        path = ROOT / name
        if not name or not (path.is_file() or path.is_symlink()):
            continue
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            copy.symlink_to(os.readlink(path))
        else:
            copy.write_bytes(path.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w"]
    built = subprocess.run(
        [sys.executable, "-m", *command, str(out), str(source)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert built.returncode == 0, built.stderr
    return next(out.glob("*.whl"))


@pytest.mark.real
def test_the_wheel_has_exactly_one_root_and_every_file(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.partition("/")[0] for name in names}
    assert {r for r in roots if not r.endswith(".dist-info")} == {"tfgrpo"}
    for package, folder in source_folders().items():
        for path in folder.iterdir():
            if path.is_file() and path.suffix != ".pyc":
                assert f"{package.replace('.', '/')}/{path.name}" in names


_HOSTILE = """
import search, rl, prompts
assert search.MINE and rl.MINE and prompts.MINE
import tfgrpo, tfgrpo.search, tfgrpo.rl, tfgrpo.routing, tfgrpo.prompts
from importlib.resources import files
assert files("tfgrpo.report").joinpath("page.css").is_file()
assert tfgrpo.prompts.load("lessons")
from tfgrpo import ChatPolicy, Task, open_lm, sample_group
from tfgrpo.runtime.event_loop import run_sync
from tfgrpo.sampling import GroupSpec
from tfgrpo.search import Node
from tfgrpo.verifiers import Exact
import tfgrpo.cli.main
assert Node.__module__ == "tfgrpo.search.node"
task = Task("t1", "yes", reference="yes")
policy = ChatPolicy(open_lm("scripted:echo"))
group = run_sync(lambda: sample_group(task, policy, Exact(), draws=GroupSpec(2)))
assert group.rewards_G == (1.0, 1.0), group
print(tfgrpo.__file__)
"""


@pytest.mark.real
def test_the_wheel_works_beside_a_users_own_modules_of_the_same_names(
    wheel: Path, tmp_path: Path
) -> None:
    installed, hostile = tmp_path / "installed", tmp_path / "hostile"
    zipfile.ZipFile(wheel).extractall(installed)
    (hostile / "prompts").mkdir(parents=True)
    for name in ("search.py", "rl.py", "prompts/__init__.py"):
        (hostile / name).write_text("MINE = True\n", encoding="utf-8")
    (hostile / "main.py").write_text(_HOSTILE, encoding="utf-8")
    # -P is not given: the user's folder stands first on the path, as in `python main.py`.
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=hostile,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(installed), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(installed))
