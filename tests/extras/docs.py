"""The extra `docs` builds a strict site with the theme, code blocks and a search."""

import subprocess
import sys
from pathlib import Path

CONFIG = """
site_name: a site
strict: true
theme: {name: material, font: false}
plugins: [search]
markdown_extensions: [attr_list, tables, pymdownx.highlight, pymdownx.superfences]
"""
Path("docs").mkdir()
Path("docs/index.md").write_text("# A page\n\n```python\nprint(1)\n```\n", encoding="utf-8")
Path("mkdocs.yml").write_text(CONFIG, encoding="utf-8")
subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q"], check=True)
assert "highlight" in Path("site/index.html").read_text(encoding="utf-8")
assert Path("site/search/search_index.json").is_file()
print("docs: a site is built")
