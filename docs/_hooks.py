"""What the site is made of beside the pages: README and CONTRIBUTING, the code that pages link to,
the table of benchmarks from the recorded figures, and the notebook as a page.

Links that leave docs/ in the repository lead to pages of the site here. Does not know the theme.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
_LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")
_MARK = "<!-- benchmarks: filled in when the site is built -->"
_HIDDEN = {"date", "command", "commit", "processor"}
_MOST_FIGURES = 6


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/ and those made of other files."""
    made = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
    for page, source in made.items():
        text = _relinked((ROOT / source).read_text(encoding="utf-8"), "")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "notebook.md", content=notebook_page()))
    for source in sorted(_linked_sources(files)):
        page, text = f"source/{source}.md", _source_page(source)
        outside = InclusionLevel.NOT_IN_NAV  # reached by links alone
        files.append(File.generated(config, page, content=text, inclusion=outside))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/, and fill in the benchmarks."""
    if page.file.src_uri.startswith("source/") or page.file.generated_by is not None:
        return markdown
    if _MARK in markdown:
        markdown = markdown.replace(_MARK, benchmark_table())
    return _relinked(markdown, "docs")


def _relinked(text: str, folder: str) -> str:
    def fix(match: re.Match[str]) -> str:
        return match[1] + _target(match[2], folder) + match[3]

    return _LINK.sub(fix, text)


def _target(link: str, folder: str) -> str:
    """Return where a link of the repository leads on the site."""
    place = posixpath.normpath(posixpath.join(folder, link))
    if place == "README.md":
        return "index.md"
    if place == "CONTRIBUTING.md":
        return "contributing.md"
    if place.startswith("docs/"):
        inside = place.removeprefix("docs/")
        return "config.md" if inside in ("schemas", "schemas/") else inside
    return f"source/{place}.md"


def _linked_sources(files: Files) -> set[str]:
    """Return the files of the repository, outside docs/, that pages link to."""
    texts = [("docs", f.content_string) for f in files.documentation_pages() if not f.generated_by]
    texts += [("", (ROOT / name).read_text(encoding="utf-8")) for name in ("README.md",)]
    texts += [("", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))]
    found = set()
    for folder, text in texts:
        for match in _LINK.finditer(text):
            place = posixpath.normpath(posixpath.join(folder, match[2]))
            is_own = place in ("README.md", "CONTRIBUTING.md") or place.startswith("docs/")
            if not is_own and (ROOT / place).is_file():
                found.add(place)
    return found


def _source_page(path: str) -> str:
    language = {".py": "python", ".toml": "toml", ".json": "json"}.get(Path(path).suffix, "text")
    code = (ROOT / path).read_text(encoding="utf-8")
    return f"# {path}\n\n````{language}\n{code}\n````\n"


def benchmark_table() -> str:
    """Return every recorded benchmark: what it measures, its first figures, how to repeat it."""
    heads = ("benchmark", "what it measures", "figures", "recorded", "command")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for path in sorted(RESULTS.glob("*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        figures = [f"{k} {_figure(v)}" for k, v in row.items() if _is_figure(k, v)]
        shown = ", ".join(figures[:_MOST_FIGURES]) or "a table, in the file"
        command = str(row.get("command", ""))
        when = f"{row.get('date', '')}, {row.get('processor', '')}"
        cells = (path.stem, _about(command), shown, when, f"`{command}`")
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines)


def _is_figure(key: str, value: Any) -> bool:
    return key not in _HIDDEN and isinstance(value, (int, float, bool))


def _figure(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}"


def _about(command: str) -> str:
    """Return the first sentence of a benchmark's own docstring."""
    found = re.search(r"python -m ([\w.]+)", command)
    path = ROOT / (found[1].replace(".", "/") if found else "none")
    for file in (path.with_suffix(".py"), path / "__main__.py"):
        if file.is_file():
            text = file.read_text(encoding="utf-8").partition('"""')[2].partition('"""')[0]
            return " ".join(text.partition("\n\n")[0].split())
    return ""


def notebook_page() -> str:
    """Return the notebook as a page: its words, its code, and where the file is."""
    path = ROOT / "docs" / "tutorial.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    parts.append("The file is [tutorial.ipynb](tutorial.ipynb); every cell runs in the tests.")
    return "\n\n".join(parts) + "\n"
