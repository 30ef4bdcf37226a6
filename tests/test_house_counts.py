"""The counts of `tests.benchmarks.runs.house`, on trees written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.runs import house


def tree(root: Path, files: dict[str, str]) -> list[house.Module]:
    """Write files below `app/`, with an `__init__` in every folder, and read them back."""
    for name, text in files.items():
        path = root / "app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.relative_to(root).parents[:-1]:
            (root / folder / "__init__.py").touch()
    return house.modules_of(root, {"app": "app"})


def test_files_are_counted_by_folder_with_the_init(tmp_path: Path) -> None:
    modules = tree(tmp_path, {"a.py": "", "b.py": "", "room/c.py": ""})
    assert house.files_by_folder(modules) == {"app": 3, "app/room": 2}


def test_a_folder_has_the_dotted_name_it_is_imported_under(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "api.py").touch()
    (only,) = house.modules_of(tmp_path, {"search": "app.search"})
    assert (only.name, only.path) == ("app.search.api", "search/api.py")


def test_a_circle_of_two_modules_is_found_though_one_import_is_for_types(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        {
            "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from app.b import B",
            "b.py": "def f():\n    import app.a",
            "c.py": "from app import a, b",
        },
    )
    assert house.circles(modules) == ["app: a b"]
    assert house.circles(modules, frozenset({("app.a", "app.b")})) == []


def test_rooms_are_in_a_circle_where_their_modules_are_in_none(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        {
            "x/one.py": "from app.y.one import f",
            "y/one.py": "",
            "y/two.py": "from app.x.two import g",
            "x/two.py": "",
        },
    )
    assert house.circles(modules) == ["app: x y"]


def test_the_face_of_a_room_may_import_its_inside(tmp_path: Path) -> None:
    modules = tree(tmp_path, {"x/one.py": "import app.x", "x/__init__.py": "from app.x import one"})
    assert house.circles(modules) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f(a, b, /, c, *, d): ...", 4),
        ("async def f(a, *rest, **more): ...", 3),
        ("class A:\n    def f(self, a): ...", 1),
        ("class A:\n    @classmethod\n    def f(cls, a, b=1): ...", 2),
        ("class A:\n    @staticmethod\n    def f(a, b): ...", 2),
        ("def f(self, a): ...", 2),
        ("class A(torch.autograd.Function):\n    @staticmethod\n    def f(ctx, a): ...", 1),
        ("class A:\n    @staticmethod\n    def f(ctx, a): ...", 2),
        ("def outer():\n    def f(a): ...", 1),
    ],
)
def test_parameters_are_what_a_caller_can_give(tmp_path: Path, text: str, count: int) -> None:
    wide = house.wide_functions(tree(tmp_path, {"a.py": text}), most=0)
    assert {w.place: w.parameters for w in wide} == {"app/a.py:f": count}


def test_a_wide_kernel_is_named_apart(tmp_path: Path) -> None:
    given = ", ".join("abcdefgh")
    text = f"@triton.jit\ndef kernel({given}): ...\ndef ours({given}): ...\ndef fits(a): ..."
    wide = house.wide_functions(tree(tmp_path, {"a.py": text}))
    assert [(str(w), w.is_forced) for w in wide] == [
        ("app/a.py:kernel 8", True),
        ("app/a.py:ours 8", False),
    ]


def test_public_names_in_two_files_are_found(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        {
            "a.py": "class Row: ...\nclass _Own: ...\ndef cut(): ...\ndef main(): ...",
            "b.py": "class Row: ...\nclass _Own: ...\ndef cut(): ...\ndef main(): ...",
            "c.py": "class Other:\n    class Row: ...\n@register\ndef cut(): ...",
        },
    )
    assert house.classes_of_one_name(modules) == {"Row": ["app/a.py", "app/b.py"]}
    assert house.functions_of_one_name(modules) == {"cut": ["app/a.py", "app/b.py"]}


def test_a_word_with_one_meaning_is_defined_once_private_or_not(tmp_path: Path) -> None:
    files = {"a.py": "class Row: ...\ndef _mean(): ...\nclass Kind: ...",
             "b.py": "class Row: ...\nclass Kind: ..."}  # fmt: skip
    assert house.defined_twice(tree(tmp_path, files)) == ["Row"]
    files["c.py"] = "def _mean(): ..."
    assert house.defined_twice(tree(tmp_path, files)) == ["Row", "_mean"]


def test_functions_of_one_body_are_found_under_any_name(tmp_path: Path) -> None:
    body = "    b = a + 1\n    b *= 2\n    return b"
    modules = tree(
        tmp_path,
        {
            "a.py": f"def f(a):\n    'One.'\n{body}\ndef short(): return 1",
            "b.py": f"class B:\n  def g(self, a):\n{body}\ndef short(): return 1",
        },
    )
    assert house.equal_functions(modules) == {"f": ["app/a.py:f", "app/b.py:g"]}


def test_a_definition_under_a_replaced_word_is_found(tmp_path: Path) -> None:
    modules = tree(tmp_path, {"a.py": "class RunStore: ...\nclass Journal: ..."})
    assert house.replaced_words(modules) == ["app/a.py:RunStore is Journal"]


def test_the_contract_of_this_checkout_is_read() -> None:
    lines, allowed = house.contract_of(house.ROOT)
    assert lines > 1
    assert all(source.startswith("tfgrpo.") for source, _ in allowed)
