"""The page docs/use.md: its code runs against the packages that are installed here.

All of it runs with the real packages in `make test-clients`.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.experience.use_page import FRAMEWORKS, LESSON, QUESTION, block, export_learnt, run
from tfgrpo import load_artefact


@pytest.fixture
def learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    export_learnt(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_a_block_sends_lessons_and_question(
    package: str, learnt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = re.findall(r"(?:library|load_artefact\([^)]*\))\.(\w+)", block(package))
    library = load_artefact("runs/mine")
    assert used and all(hasattr(library, name) for name in used)
    if package == "openai" or importlib.util.find_spec(package) is not None:
        sent, printed = run(package, monkeypatch)
        assert LESSON in sent and QUESTION in sent and "--- system ---" not in sent
        assert printed == "At the depot."


def test_the_files_hold_one_prompt_in_each_form(learnt: Path) -> None:
    library = load_artefact("runs/mine")
    turns = json.loads((learnt / "runs/mine/messages.json").read_text())
    filled = [t | {"content": t["content"].replace("<task>", QUESTION)} for t in turns]
    assert filled == library.for_openai(QUESTION)
    text = (learnt / "runs/mine/instructions.txt").read_text()
    assert LESSON in text and "---" not in text and "<task>" not in text
    request = library.for_anthropic(QUESTION)
    assert LESSON in request["system"]
    assert request["messages"] == [{"role": "user", "content": QUESTION}]


def test_the_gateways_block_is_a_valid_config(learnt: Path) -> None:
    import tomllib

    from tests.experience.use_page import PAGE
    from tfgrpo.serve.settings import GatewaySettings

    (text,) = re.findall(r"^```text\n(\[serve\].*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    config = GatewaySettings.model_validate(tomllib.loads(text))
    assert config.routes["support"].library == "runs/mine/library.json"
