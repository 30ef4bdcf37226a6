"""Two houses for writers: tasks in prose, rules that nobody can guess.

Used with replies written by people or by any model behind the queue (`queue_lm`), never with the
simulators. Does not know methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.benchmarks.learning.house_rules.families.family import (
    Case,
    Family,
    Parts,
    Record,
    line_judge,
)


@dataclass(frozen=True, slots=True)
class ProseFamily(Family):
    """A family whose tasks are sentences in place of records."""

    tell: Callable[[Record], str] = lambda record: str(record)
    """A record as the text of a task."""

    def case(self, task_id: str, record: Record) -> Case:
        """Return the task of a record."""
        parts = self.wanted(record)
        return Case(task_id, self.tell(record), self.render(parts, record), parts)


# --- a bakery's order desk -------------------------------------------------------------------

_LINE = {
    "rye loaves": "K3",
    "croissants": "K1",
    "bagels": "K3",
    "seeded rolls": "K4",
    "brioche": "K2",
}
_CRATE = {"K1": 20, "K2": 20, "K3": 24, "K4": 30, "K9": 12}
_SLOT = {"hotel": "05", "school": "09", "café": "06", "hospital": "04"}


def _bakery(r: Record) -> Parts:
    line = "K9" if r["note"] == "nut-free" else _LINE[r["product"]]
    crates = math.ceil(int(r["quantity"]) / _CRATE[line])
    slot = "11" if r["day"] == "Saturday" else _SLOT[r["customer"]]
    return {"line": line, "crates": str(crates), "slot": slot}


def _bakery_text(r: Record) -> str:
    note = " Everything must be nut-free." if r["note"] == "nut-free" else ""
    return (
        f"Order by phone: the {r['customer']} on the square would like {r['quantity']} "
        f"{r['product']} for {r['day']}.{note}"
    )


_BAKERY_PARTS = ("line", "crates", "slot")

BAKERY = ProseFamily(
    name="bakery",
    system=(
        "You book orders of a bakery. Answer with line/crates/slot on one line and nothing else. "
        "line is one of K1, K2, K3, K4, K9. crates is a whole number. slot is a two-digit hour."
    ),
    description="Orders of a bakery get a production line, a number of crates and a delivery slot.",
    parts=_BAKERY_PARTS,
    fields={
        "product": tuple(_LINE),
        "quantity": ("24", "48", "60", "96", "120"),
        "customer": tuple(_SLOT),
        "day": ("Tuesday", "Thursday", "Saturday"),
        "note": ("none", "none", "none", "nut-free"),
    },
    intro="",
    rules=(
        "Rye loaves and bagels are made on K3, croissants on K1, rolls on K4, brioche on K2.",
        "Nut-free orders go to line K9, whatever the product.",
        "A crate holds 20 pieces on K1 and K2, 24 on K3, 30 on K4 and 12 on K9; round up.",
        "Hotels get slot 05, schools 09, cafés 06, hospitals 04.",
        "On Saturday the slot is always 11.",
    ),
    wanted=_bakery,
    render=lambda p, r: "/".join(p[k] for k in _BAKERY_PARTS),
    judge=line_judge(_BAKERY_PARTS, "/"),
    tell=_bakery_text,
)

# --- a museum's loans desk -------------------------------------------------------------------

_FORM = {"painting": "F4", "drawing": "F2", "coin": "F7", "textile": "F4", "manuscript": "F2"}
_DEPOSITS: Mapping[str, int] = {"3,000": 150, "8,000": 300, "15,000": 300, "40,000": 900}
_WHERE = {"in our own city": "WALK", "in the next region": "VAN", "abroad": "CRATE"}


def _museum(r: Record) -> Parts:
    deposit = _DEPOSITS[r["value"]] // (2 if r["borrower"] == "university" else 1)
    courier = "CRATE" if r["month"] == "December" else _WHERE[r["place"]]
    return {"form": _FORM[r["object"]], "deposit": str(deposit), "courier": courier}


def _museum_text(r: Record) -> str:
    return (
        f"A {r['borrower']} {r['place']} asks to borrow a {r['object']} valued at {r['value']} "
        f"euros; the loan starts in {r['month']}."
    )


_MUSEUM_PARTS = ("form", "deposit", "courier")

MUSEUM = ProseFamily(
    name="museum",
    system=(
        "You prepare loans of a museum. Answer with form, deposit in euros and courier as "
        "form/deposit/courier on one line and nothing else. form is one of F2, F4, F7. courier is "
        "one of WALK, VAN, CRATE."
    ),
    description="Requests for loans get a form, a deposit and a courier.",
    parts=_MUSEUM_PARTS,
    fields={
        "object": tuple(_FORM),
        "value": tuple(_DEPOSITS),
        "borrower": ("university", "gallery", "private collector"),
        "place": tuple(_WHERE),
        "month": ("March", "June", "December"),
    },
    intro="",
    rules=(
        "Paintings and textiles take form F4, drawings and manuscripts F2, coins F7.",
        "The deposit is 150 below 5,000 euros, 300 up to 20,000, 900 above.",
        "A university pays half the deposit.",
        "Couriers: WALK in our own city, VAN in the next region, CRATE abroad.",
        "In December the courier is always CRATE.",
    ),
    wanted=_museum,
    render=lambda p, r: "/".join(p[k] for k in _MUSEUM_PARTS),
    judge=line_judge(_MUSEUM_PARTS, "/"),
    tell=_museum_text,
)

HOUSES = {f.name: f for f in (BAKERY, MUSEUM)}
