"""Labels and codes: a helpdesk's tickets get queue, priority and hours."""

from __future__ import annotations

from tests.benchmarks.learning.house_rules.families.family import Family, Parts, Record, line_judge

_PARTS = ("queue", "priority", "hours")
_QUEUE = {
    "laptop": "FAC",
    "badge reader": "NET",
    "printer": "ACC",
    "phone": "FAC",
    "projector": "NET",
    "scanner": "HW",
}
_PRIORITY = {"one person": "1", "one team": "3", "whole site": "2"}
_HOURS = {"1": 8, "2": 4, "3": 16}


def _wanted(r: Record) -> Parts:
    queue = "HW" if r["caller"] == "contractor" else _QUEUE[r["device"]]
    priority = "1" if r["building"] == "lab" else _PRIORITY[r["affected"]]
    hours = _HOURS[priority] * (2 if r["day"] == "Friday" else 1)
    return {"queue": queue, "priority": priority, "hours": str(hours)}


LABELS = Family(
    name="labels",
    system=(
        "You route the tickets of a helpdesk. The answer has the parts queue, priority and hours, "
        "written on one line as queue/priority/hours and nothing else. queue is one of NET, HW, "
        "ACC, FAC. priority is one of 1, 2, 3. hours is one of 4, 8, 16, 32."
    ),
    description="Tickets of a helpdesk get a queue, a priority and the hours until an answer.",
    parts=_PARTS,
    fields={
        "device": tuple(_QUEUE),
        "affected": tuple(_PRIORITY),
        "day": ("Monday", "Friday", "Tuesday"),
        "building": ("north", "lab", "south", "harbour"),
        "caller": ("employee", "contractor", "visitor", "intern"),
    },
    intro="A ticket has come in:",
    rules=(
        "Laptops and phones go to queue FAC, badge readers and projectors to NET, printers to "
        "ACC and scanners to HW.",
        "Tickets from a contractor always go to queue HW, whatever the device is.",
        "Priority is 1 if one person is affected, 2 if the whole site is affected and 3 if one "
        "team is affected.",
        "In the building lab the priority is always 1.",
        "Hours are 8 for priority 1, 4 for priority 2 and 16 for priority 3.",
        "On Fridays the hours are doubled.",
    ),
    wanted=_wanted,
    render=lambda p, r: "/".join(p[k] for k in _PARTS),
    judge=line_judge(_PARTS, "/"),
)
