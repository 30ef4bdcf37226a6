"""The config reference: a sentence for every key, and pages that say what the models say.

`python -m tests.config.test_reference` writes docs/config.md and docs/schemas/.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.cli.command_line import folder_with, here
from tfgrpo.cli.config import VERBS, extra_of, model_of
from tfgrpo.config.learn import Config
from tfgrpo.config.reference import markdown, parts_of, schema_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "config.md"
SCHEMAS = ROOT / "docs" / "schemas"
HEAD = """\
# Config reference

Every key of every config file: what it does, what may stand there, what it is without you. Made
from the models that check the files (`python -m tests.config.test_reference`); a test holds the
two together. `tfgrpo config show FILE` prints the same sentences beside your own values,
`--section learn.settings` a part, `--for train` another verb's.

An unknown key is an error that names the nearest known one. Paths are relative to the file. `--set
section.key=value` wins over the file. A key that is left out has its default; `unset` means that
nobody sets it.

**Completion in an editor.** [schemas/](schemas/) holds a JSON Schema for each verb. With Taplo or
Even Better TOML, the first line of a config names it: `#:schema PATH/docs/schemas/learn.json`
(`tfgrpo config show --schema --for learn > learn.json` writes the file where only the package is
installed).
"""


def page() -> str:
    """Return the reference as Markdown."""
    lines = [HEAD]
    for name, verb in VERBS.items():
        lines += markdown(verb.title, parts_of(model_of(name), "", extra_of(name)))
    return "\n".join(lines).rstrip() + "\n"


def schemas() -> dict[str, str]:
    """Return the schema files of the verbs that read a config."""
    return {
        f"{name}.json": json.dumps(
            schema_of(model_of(name), f"Settings of tfgrpo {name}", extra_of(name)), indent=1
        )
        + "\n"
        for name in VERBS
        if name != "escalate"
    }


@pytest.mark.parametrize("verb", VERBS)
def test_every_key_has_a_sentence(verb: str) -> None:
    bare = [
        f"{part.name}.{key.name}"
        for part in parts_of(model_of(verb), "", extra_of(verb))
        for key in part.keys
        if not key.sentence.endswith((".", "?")) or not key.kind or not key.default
    ]
    assert bare == []


def test_the_page_and_the_schemas_are_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.config.test_reference"
    kept = {path.name: path.read_text(encoding="utf-8") for path in SCHEMAS.glob("*.json")}
    assert kept == schemas(), "python -m tests.config.test_reference"


@pytest.mark.parametrize("name", ["learn", "train", "search", "serve"])
def test_a_schema_is_one_and_describes_every_property(name: str) -> None:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    for place in (schema, *schema.get("$defs", {}).values()):
        for key, row in place.get("properties", {}).items():
            assert "description" in row or "$ref" in json.dumps(row), key


def test_the_schema_takes_what_the_model_takes_and_refuses_what_it_refuses() -> None:
    check = jsonschema.Draft202012Validator(json.loads((SCHEMAS / "learn.json").read_text("utf-8")))
    for path in sorted((ROOT / "examples").rglob("config.toml")):
        assert check.is_valid(tomllib.loads(path.read_text("utf-8"))), path
    for wrong in ({"gate": {"group_sise": 2}}, {"learn": {"epochs": 0}}, {"policy": {"kind": "x"}}):
        assert not check.is_valid(wrong), wrong
    assert check.is_valid({"learn": {"settings": {"caps": {"entries": 3}}}})


def test_what_config_show_prints_reads_back_as_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = folder_with(tmp_path, "[learn]\nsettings = {exemplars = 2}") / "config.toml"
    shown = here(capsys, "config", "show", str(config))
    assert shown.code == 0
    again = Config.from_mapping(tomllib.loads(shown.out)).to_json()
    once = Config.from_mapping(tomllib.loads(config.read_text())).to_json()
    assert {k: v for k, v in again.items() if k != "repairs"} | {"learn": None} == {
        k: v for k, v in once.items() if k != "repairs"
    } | {"learn": None}
    assert "# How many tasks decide what is kept" in shown.out


def test_overrides_count_without_a_file_and_sections_can_be_shown_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "\nbatch = 7\n" in here(capsys, "config", "show", "--set", "learn.batch=7").out
    part = here(capsys, "config", "show", "--section", "learn.settings.caps").out
    assert tomllib.loads(part) == {"learn": {"settings": {"caps": {"entries": 40, "tokens": 4000}}}}
    wrong = here(capsys, "config", "show", "--section", "gaet")
    assert wrong.code == 2 and "no section 'gaet'" in wrong.err


@pytest.mark.parametrize("verb", ["train", "search", "serve"])
def test_settings_of_another_verb_are_shown_and_named(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "train": "[optimiser]\nsteps = 3\n",
        "search": 'tasks = "t.jsonl"\n[search]\nsamples = 3\n',
        "serve": "[serve]\nin_flight = 3\n",
    }
    (tmp_path / "c.toml").write_text(texts[verb])
    shown = here(capsys, "config", "show", str(tmp_path / "c.toml"))
    assert shown.code == 0 and "= 3\n" in shown.out
    learnt = here(capsys, "learn", str(tmp_path / "c.toml"))
    assert learnt.code == 2 and f"tfgrpo {verb} {tmp_path / 'c.toml'}" in learnt.err


def written() -> list[Path]:
    """Write the page and the schemas; returns the files."""
    SCHEMAS.mkdir(exist_ok=True)
    files: dict[Path, Any] = {PAGE: page()}
    files |= {SCHEMAS / name: text for name, text in schemas().items()}
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)


if __name__ == "__main__":
    print("\n".join(str(path.relative_to(ROOT)) for path in written()))
