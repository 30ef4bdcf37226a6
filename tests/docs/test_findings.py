"""Every finding of newcomers has an end: a test that exists, or a reason."""

from __future__ import annotations

from tests.benchmarks.users.findings import exists, findings, problems


def test_every_finding_is_mended_with_a_test_or_left_with_a_reason() -> None:
    assert problems() == []
    assert len(findings()) == 53


def test_a_test_that_is_not_there_is_seen() -> None:
    assert not exists("tests/docs/test_findings.py::test_that_nobody_wrote")
    assert not exists("tests/docs/nowhere.py::test_x")
