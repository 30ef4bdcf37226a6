"""Free text under a rubric of parts: a workshop's reply of five lines."""

from __future__ import annotations

from tests.benchmarks.learning.house_rules.families.family import Case, Family, Parts, Record

_PARTS = ("greeting", "remedy", "contact", "deadline", "closing")
_OPTIONS = {
    "greeting": ("Dear member", "Hello there", "Good day"),
    "remedy": ("a free repair", "a voucher", "a loan bicycle", "a refund"),
    "contact": ("the harbour desk", "the north desk", "the hotline"),
    "deadline": ("3 days", "8 days", "14 days", "25 days"),
    "closing": ("Warm wishes", "Kind regards", "Your workshop"),
}
_GREETING = {"member": "Good day", "guest": "Dear member", "club": "Hello there"}
_CONTACT = {"Eastby": "the hotline", "Norham": "the harbour desk", "Kell": "the hotline",
            "Stowe": "the north desk"}  # fmt: skip
_CLOSING = {"member": "Your workshop", "guest": "Warm wishes", "club": "Your workshop"}
_REMEDY = {"brake": "a loan bicycle", "lamp": "a voucher", "tyre": "a refund",
           "chain": "a free repair", "saddle": "a voucher"}  # fmt: skip
_DEADLINE = {"a loan bicycle": "14 days", "a voucher": "3 days", "a refund": "8 days",
             "a free repair": "14 days"}  # fmt: skip
_LINE = {
    "greeting": "{},",
    "remedy": "We offer you {}.",
    "contact": "Please turn to {}.",
    "deadline": "You hear from us within {}.",
    "closing": "{}",
}


def _wanted(r: Record) -> Parts:
    remedy = "a refund" if float(r["age in months"]) < 4 else _REMEDY[r["fault"]]
    deadline = "25 days" if r["season"] == "winter" else _DEADLINE[remedy]
    return {
        "greeting": _GREETING[r["customer"]],
        "remedy": remedy,
        "contact": _CONTACT[r["town"]],
        "deadline": deadline,
        "closing": "Kind regards" if r["season"] == "spring" else _CLOSING[r["customer"]],
    }


def _render(p: Parts, r: Record) -> str:
    return "\n".join(_LINE[k].format(p[k]) for k in _PARTS)


def _judge(reply: str, case: Case) -> dict[str, bool]:
    """A part is right where its phrase stands in the reply and no other phrase of that part."""
    text = " ".join(reply.split()).casefold()
    right = {}
    for part, options in _OPTIONS.items():
        named = [o for o in options if o.casefold() in text]
        right[part] = named == [case.parts[part]]
    return right


LETTERS = Family(
    name="letters",
    system=(
        "You answer the letters of a bicycle workshop's customers. The answer has the parts "
        "greeting, remedy, contact, deadline and closing, each on a line of its own in this order "
        "and nothing else. greeting is one of Dear member, Hello there, Good day. remedy is one of "
        "a free repair, a voucher, a loan bicycle, a refund. contact is one of the harbour desk, "
        "the north desk, the hotline. deadline is one of 3 days, 8 days, 14 days, 25 days. closing "
        "is one of Warm wishes, Kind regards, Your workshop."
    ),
    description="Customers of a bicycle workshop get a reply of five lines.",
    parts=_PARTS,
    fields={
        "fault": tuple(_REMEDY),
        "customer": ("member", "guest", "club"),
        "age in months": tuple(str(m) for m in range(1, 17)),
        "season": ("spring", "winter", "summer"),
        "town": ("Eastby", "Norham", "Kell", "Stowe"),
    },
    intro="A customer complains:",
    rules=(
        "The greeting is Good day for a member, Dear member for a guest and Hello there for a "
        "club.",
        "The remedy is a loan bicycle for a brake, a voucher for a lamp or saddle, a refund for a "
        "tyre and a free repair for a chain.",
        "When age in months is under 4 the remedy is always a refund.",
        "The contact is the hotline for the towns Eastby and Kell, the harbour desk for Norham and "
        "the north desk for Stowe.",
        "The deadline is 14 days if the remedy is a loan bicycle or a free repair, 3 days if it is "
        "a voucher and 8 days if it is a refund.",
        "In winter the deadline is always 25 days.",
        "The closing is Your workshop for a member or a club and Warm wishes for a guest.",
        "In spring the closing is always Kind regards.",
    ),
    wanted=_wanted,
    render=_render,
    judge=_judge,
)
