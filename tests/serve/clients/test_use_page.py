"""The code of docs/use.md with the real packages of other frameworks (`make test-clients`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experience.use_page import FRAMEWORKS, LESSON, QUESTION, export_learnt, run

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # other packages' own
]


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_a_block_of_the_page_runs_with_the_real_package(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    export_learnt(tmp_path)
    monkeypatch.chdir(tmp_path)
    sent, printed = run(package, monkeypatch)
    assert LESSON in sent and QUESTION in sent
    assert printed == "At the depot."
