"""Every settings fragment on the training page is one that `tfgrpo train` takes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tfgrpo.rl.config import TrainConfig

PAGE = Path(__file__).parents[2] / "docs" / "rl.md"
FRAGMENTS = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_has_a_fragment_for_every_section() -> None:
    shown = {name for text in FRAGMENTS for name in tomllib.loads(text)}
    own_pages = {"loss", "hints"}
    assert set(TrainConfig.model_fields) - own_pages <= shown


@pytest.mark.parametrize("text", FRAGMENTS)
def test_a_fragment_of_the_page_is_valid(text: str) -> None:
    values = tomllib.loads(text)
    read = TrainConfig.from_mapping(values, "docs/rl.md").to_json()
    for section, given in values.items():
        assert {key: read[section][key] for key in given} == given
