"""The example from learning to the table, in its short form, on the embedded model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.real
@pytest.mark.long
def test_the_short_example_goes_the_whole_way(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location(
        "example_escalate", ROOT / "examples" / "escalate/run.py"
    )
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    run = tmp_path / "run"
    result = example.main(["--folder", str(run), "--short"])
    arms = result.table.arms
    assert arms.keys() == {"base", "base_library", "trained", "trained_library"}
    assert all(i.n_tasks == 3 and 0 <= i.estimate <= 1 for i in arms.values())
    said = capsys.readouterr()
    assert "learnt:" in said.out and "advice 1:" in said.out and "trained" in said.out
    assert "distil: " in said.err and "model to train: local:smollm2-135m" in said.err
    page = json.loads((run / "escalate" / "escalate.json").read_text())
    assert page["plan"]["distil"] == "supervised"
    assert result.distilled is not None and result.distilled.rows["exemplar"] == 2
