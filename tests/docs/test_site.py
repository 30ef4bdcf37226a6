"""The site builds without a warning, fetches nothing from elsewhere, and holds every benchmark."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_of_the_repository_is_on_the_site(site: Path) -> None:
    names = {p.stem for p in (ROOT / "docs").glob("*.md")} | {"index", "contributing", "notebook"}
    assert {p.stem for p in site.glob("*.html")} >= names


def test_every_link_of_the_site_leads_to_a_file_of_it(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue  # its links are absolute: it is shown at any address
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text("utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.name} → {target}"


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)[^>]*src="(https?:[^"]+)', text)
        fetched += re.findall(
            r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(https?:[^"]+)', text
        )
        assert fetched == [], page.name


def test_every_recorded_benchmark_has_its_row_with_its_command(site: Path) -> None:
    text = (site / "benchmarks.html").read_text("utf-8")
    for path in (ROOT / "tests" / "benchmarks" / "results").glob("*.json"):
        assert f"<td>{path.stem}</td>" in text, path.stem
    assert text.count("<code>python -m tests.benchmarks") > 20
