"""`report`: a learnt run becomes a page with charts."""

import subprocess
import sys
from pathlib import Path


def tfgrpo(*arguments: str) -> int:
    command = [sys.executable, "-m", "tfgrpo", *arguments]
    return subprocess.run(command, capture_output=True, check=False).returncode


assert tfgrpo("init", "first") == 0
# digits drawn by chance prove nothing, so that any verdict is right
assert tfgrpo("learn", "first/config.toml", "--set", "policy.lm=scripted:digits") in (0, 1, 5)
assert tfgrpo("report", "runs/first") == 0
page = Path("runs/first/report.html").read_text(encoding="utf-8")
assert "<svg" in page and "tfgrpo[report]" not in page
