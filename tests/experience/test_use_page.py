"""The page docs/use.md: its code runs against the packages that are installed here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tfgrpo.experience.artefact import Artefact, export_artefact
from tfgrpo.experience.library import from_texts
from tfgrpo.testing import FaultServer

PAGE = Path(__file__).parents[2] / "docs" / "use.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)


@pytest.fixture
def learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    export_artefact(Artefact(from_texts(["Look the order up first."])), tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_openai_block_sends_the_lessons(learnt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [b for b in BLOCKS if "from openai import" in b]
    with FaultServer() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        exec(compile(code, PAGE.name, "exec"), {})
        (call,) = server.calls
    sent = call.body["messages"]
    assert "Look the order up first." in sent[0]["content"]
    assert sent[-1] == {"role": "user", "content": "Where is order 4711?"}


@pytest.mark.parametrize("package", ["anthropic", "langchain_openai", "dspy", "pydantic_ai"])
def test_a_block_of_another_framework_uses_what_the_artefact_has(
    package: str, learnt: Path
) -> None:
    """The frameworks are not installed here: what the block takes of ours must exist."""
    (code,) = [b for b in BLOCKS if package in b]
    from tfgrpo import load_artefact

    library = load_artefact("runs/mine")
    used = set(re.findall(r"(?:library|load_artefact\([^)]*\))\.(\w+)", code))
    assert used and all(hasattr(library, name) for name in used)
