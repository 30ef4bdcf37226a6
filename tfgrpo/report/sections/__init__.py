"""The report's sections below the result: each turns its part of the summary into markup."""

from tfgrpo.report.sections.ending import advice, method, rejected, spend
from tfgrpo.report.sections.groups import groups
from tfgrpo.report.sections.library import library, use
from tfgrpo.report.sections.steps import curve, nudge, reflection
from tfgrpo.report.sections.tasks import tasks

__all__ = [
    "advice",
    "curve",
    "groups",
    "library",
    "method",
    "nudge",
    "reflection",
    "rejected",
    "spend",
    "tasks",
    "use",
]
