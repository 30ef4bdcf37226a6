"""How the code is laid out, counted: folders, import circles, wide signatures, words used twice.

Everything is read as text with `ast`; only the import contracts are run, by import-linter.

Run: python -m tests.benchmarks.runs.house
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tfgrpo.runtime.syntax import syntax_tree

ROOT = Path(__file__).parents[3]
FOLDERS = {
    "tfgrpo": "tfgrpo",
    "search": "tfgrpo.search",
    "rl": "tfgrpo.rl",
    "routing": "tfgrpo.routing",
}
"""Top-level folders and the dotted name that each is imported under."""

MOST_FILES = 18
MOST_PARAMETERS = 7

FORCED = {"gqa_attention.py:_grouped_attention"}
"""Called by a framework with a signature of its own: the attention function of transformers."""

REPLACED = {
    "Parts": "Overrides, LoadedModel", "Roles": "RunComponents", "Proof": "TestComparison",
    "Learned": "LearnOutcome", "RunStore": "Journal", "Maker": "RolloutMaker",
    "PlayMaker": "MultiTurnMaker", "Roller": "StepSampler", "Counted": "CountingGenerator",
    "Batches": "BatchQueue", "Service": "BatchScheduler", "Updated": "UpdateReport",
    "RowFacts": "RowFeatures", "Sources": "FeatureSources", "Fold": "SearchState",
    "Work": "VisitRequest", "Visit": "VisitResult", "Brood": "LazyChildren",
    "Booking": "Reservations", "Chains": "BestOfN", "born": "make_node", "memo": "scorer_state",
    "family": "open_children", "Draws": "GroupSpec", "NudgeObjective": "NudgeRL",
    "grouped_attention": "gqa_attention", "SentenceEmbedder": "SentenceEncoder",
}  # fmt: skip
"""Words that another has taken the place of: a definition under an old one makes two words for one
thing."""


ONE_MEANING = frozenset((
    "Outcome", "Environment", "ToolEnvironment", "Nudge", "Proposal", "Plan", "Version", "Decision",
    "Evidence", "Rolled", "Row", "Seen", "Task", "Rollout", "RolloutGroup", "Score", "Context",
    "Library", "Journal", "Budget", "one_line", "estimate_tokens", "sampling_of", "judge", "_mean",
    "HashedNgrams", "SentenceEncoder", "hint_texts", "leaks",
))  # fmt: skip
"""Words that stand for one thing everywhere. Other names may be defined in two rooms, where each
means what its room is about; they are listed apart."""


@dataclass(frozen=True)
class Module:
    """One Python file, parsed."""

    path: str
    name: str
    """Dotted name it is imported under; a package's own name for its `__init__`."""
    is_package: bool
    tree: ast.Module


def modules_of(root: Path, folders: Mapping[str, str] = FOLDERS) -> list[Module]:
    """Return every Python file below the folders, links not followed."""
    modules = []
    for folder, dotted in folders.items():
        for path in sorted((root / folder).rglob("*.py")):
            if "__pycache__" in path.parts:
                continue
            inner = path.relative_to(root / folder).with_suffix("").parts
            is_package = inner[-1] == "__init__"
            name = ".".join((dotted, *(inner[:-1] if is_package else inner)))
            tree = syntax_tree(path.read_text(encoding="utf-8"))
            modules.append(Module(path.relative_to(root).as_posix(), name, is_package, tree))
    return modules


# --- folders --------------------------------------------------------------------------------------


def files_by_folder(modules: Iterable[Module]) -> dict[str, int]:
    """Return how many Python files stand in each folder, `__init__` included."""
    counts: dict[str, int] = defaultdict(int)
    for module in modules:
        counts[module.path.rpartition("/")[0]] += 1
    return dict(counts)


# --- imports --------------------------------------------------------------------------------------


def imports_of(module: Module, known: frozenset[str]) -> set[str]:
    """Return the known modules that one imports anywhere in its text, for types as well."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return (found & known) - {module.name}


def circles(modules: list[Module], but: frozenset[tuple[str, str]] = frozenset()) -> list[str]:
    """Return the import circles among the direct children of every package.

    A child stands for everything below it; what a package's own `__init__` imports is left out,
    since a room's face imports its inside by design.

    Args:
        modules: the tree.
        but: (importer, imported) pairs that are allowed by name.
    """
    known = frozenset(m.name for m in modules)
    edges = [
        (m.name, target)
        for m in modules
        for target in imports_of(m, known)
        if (m.name, target) not in but
    ]
    found = []
    for package in sorted(m.name for m in modules if m.is_package):
        arrows: dict[str, set[str]] = defaultdict(set)
        for source, target in edges:
            one, other = _child(package, source), _child(package, target)
            if one and other and one != other:
                arrows[one].add(other)
        found += [f"{package}: {' '.join(sorted(c))}" for c in _components(arrows)]
    return found


def _child(package: str, name: str) -> str:
    """Return the direct child of a package that a module is or lies in; empty for none."""
    if not name.startswith(package + "."):
        return ""
    return name[len(package) + 1 :].partition(".")[0]


def _components(arrows: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the sets of two or more nodes that all reach each other."""
    reach = {node: _reached(node, arrows) for node in arrows}
    found: list[set[str]] = []
    for node in sorted(reach):
        circle = {other for other in reach[node] if node in reach.get(other, set())}
        if circle and circle not in found:
            found.append(circle)
    return found


def _reached(start: str, arrows: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(arrows.get(start, ()))
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += arrows.get(node, ())
    return seen


# --- signatures -----------------------------------------------------------------------------------

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Wide:
    """A function with more parameters than the house allows."""

    place: str
    parameters: int
    is_forced: bool
    """Whether a framework fixes the signature, such as a Triton kernel's."""

    def __str__(self) -> str:
        return f"{self.place} {self.parameters}"


def wide_functions(modules: Iterable[Module], most: int = MOST_PARAMETERS) -> list[Wide]:
    """Return the functions with more than `most` parameters.

    `self`, `cls` and the `ctx` of a `torch.autograd.Function` do not count; `*args` and `**kwargs`
    count one each.
    """
    found = []
    for module in modules:
        for function, owner in functions_of(module.tree):
            count = parameters_of(function, owner)
            if count > most:
                place = f"{module.path}:{function.name}"
                found.append(Wide(place, count, _is_forced(function, place)))
    return found


def functions_of(
    tree: ast.AST, owner: ast.ClassDef | None = None
) -> Iterator[tuple[_Function, ast.ClassDef | None]]:
    """Yield every function at any depth, with the class whose direct member it is."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function):
            yield node, owner
            yield from functions_of(node)
        else:
            yield from functions_of(node, node if isinstance(node, ast.ClassDef) else owner)


def parameters_of(function: _Function, owner: ast.ClassDef | None) -> int:
    """Return how many parameters a caller can give."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    implied = {"self", "cls"} if owner else set()
    if owner and any(ast.unparse(base).endswith("autograd.Function") for base in owner.bases):
        implied.add("ctx")
    if names and names[0] in implied:
        del names[0]
    return len(names) + bool(given.vararg) + bool(given.kwarg)


def _is_forced(function: _Function, place: str) -> bool:
    marks = {ast.unparse(d).partition("(")[0] for d in function.decorator_list}
    return "triton.jit" in marks or any(place.endswith(f"/{name}") for name in FORCED)


# --- words ----------------------------------------------------------------------------------------


def classes_of_one_name(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return public classes that are defined in more than one file."""
    return _in_several(
        (node.name, module.path)
        for module in modules
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def functions_of_one_name(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return public functions of modules that are defined in more than one file.

    Decorated ones are named by what they register for, those of `cli` by their command, and a
    program's `main` by its file: they do not count.
    """
    return _in_several(
        (node.name, module.path)
        for module in modules
        if not module.name.startswith("tfgrpo.cli.")
        for node in module.tree.body
        if isinstance(node, _Function)
        and not node.name.startswith("_")
        and not node.decorator_list
        and node.name != "main"
    )


def equal_functions(modules: Iterable[Module], least_statements: int = 3) -> dict[str, list[str]]:
    """Return functions of equal body, docstring aside, that are written more than once."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for function, _ in functions_of(module.tree):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            if sum(isinstance(n, ast.stmt) for s in body for n in ast.walk(s)) >= least_statements:
                text = "\n".join(ast.unparse(statement) for statement in body)
                places[text].append(f"{module.path}:{function.name}")
    return {
        where[0].rpartition(":")[2]: sorted(where) for where in places.values() if len(where) > 1
    }


def defined_twice(modules: Iterable[Module]) -> list[str]:
    """Return the words of `ONE_MEANING` that more than one file defines, private ones too."""
    places = defaultdict(set)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                places[node.name].add(module.path)
    return sorted(word for word in ONE_MEANING if len(places[word]) > 1)


def replaced_words(modules: Iterable[Module]) -> list[str]:
    """Return modules, classes, functions and methods that are named by a replaced word."""
    found = set()
    for module in modules:
        names = [module.name.rpartition(".")[2]]
        names += [n.name for n in ast.walk(module.tree) if isinstance(n, _Function | ast.ClassDef)]
        found |= {f"{module.path}:{name} is {REPLACED[name]}" for name in names if name in REPLACED}
    return sorted(found)


def _in_several(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    places: dict[str, set[str]] = defaultdict(set)
    for name, path in pairs:
        places[name].add(path)
    return {name: sorted(where) for name, where in sorted(places.items()) if len(where) > 1}


# --- contracts ------------------------------------------------------------------------------------


def contract_of(root: Path) -> tuple[int, frozenset[tuple[str, str]]]:
    """Return the lines of the rooms contract and the imports that it allows by name."""
    tool = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    rooms = tool["importlinter"]["contracts"][0]
    allowed = (line.split(" -> ") for line in rooms.get("ignore_imports", ()))
    return len(rooms["layers"]), frozenset((source, target) for source, target in allowed)


def contracts_broken(root: Path) -> int:
    """Return how many import contracts import-linter finds broken."""
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", script, "--no-cache"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    said = re.search(r"(\d+) kept, (\d+) broken", done.stdout)
    if said is None:
        raise RuntimeError(f"import-linter counted nothing: {done.stdout}{done.stderr}")
    return int(said[2])


def counted(root: Path) -> dict[str, Any]:
    """Return every figure of the tree below `root` but the contracts' state."""
    modules = modules_of(root)
    folders = files_by_folder(modules)
    lines, allowed = contract_of(root)
    wide = wide_functions(modules)
    free = [w for w in wide if not w.is_forced]
    found_circles = circles(modules, allowed)
    classes, functions = classes_of_one_name(modules), functions_of_one_name(modules)
    return {
        "largest_folder": max(folders.values()),
        "folders_over_18": {f: n for f, n in folders.items() if n > MOST_FILES},
        "circles": len(found_circles),
        "circles_found": found_circles,
        "contract_lines": lines,
        "functions_over_7": len(free),
        "widest": [str(w) for w in free],
        "signatures_forced_by_frameworks": [str(w) for w in wide if w.is_forced],
        "duplicate_words": [*defined_twice(modules), *replaced_words(modules)],
        "classes_of_one_name": classes,
        "functions_of_one_name": functions,
        "equal_functions": equal_functions(modules),
    }


def main() -> None:
    figures = counted(ROOT)
    figures["contracts_broken"] = contracts_broken(ROOT)
    record("house", figures, "python -m tests.benchmarks.runs.house")


if __name__ == "__main__":
    main()
