"""The scripts run in environments of their own, not when tests are collected."""

from pathlib import Path

_HERE = Path(__file__).parent
collect_ignore = [
    p.name for p in _HERE.glob("*.py") if not p.stem.startswith(("test_", "_", "conftest"))
]
