"""A numeric policy: refunds get a decision, a percentage and an approver, by thresholds."""

from __future__ import annotations

from tests.benchmarks.learning.house_rules.families.family import Family, Parts, Record, line_judge

_PARTS = ("decision", "percent", "approver")
_PERCENT = {"basic": 70, "plus": 55, "gold": 90}


def _wanted(r: Record) -> Parts:
    amount, days = float(r["amount"]), float(r["days"])
    decision = "APPROVE" if amount > 170 else "REVIEW"
    if days > 65:
        decision = "DENY"
    percent = _PERCENT[r["customer"]] - (15 if r["channel"] == "shop" else 0)
    approver = "finance" if days > 30 else "clerk"
    if r["category"] == "audio":
        approver = "lead"
    return {"decision": decision, "percent": str(percent), "approver": approver}


THRESHOLDS = Family(
    name="thresholds",
    system=(
        "You decide on refunds. The answer has the parts decision, percent and approver, written "
        "on one line as decision | percent | approver and nothing else. decision is one of "
        "APPROVE, REVIEW, DENY. percent is one of 40, 55, 70, 75, 90. approver is one of clerk, "
        "lead, finance."
    ),
    description="Refund requests get a decision, the percentage paid and who approves it.",
    parts=_PARTS,
    fields={
        "amount": tuple(str(a) for a in range(20, 340, 20)),
        "days": tuple(str(d) for d in range(5, 85, 5)),
        "customer": tuple(_PERCENT),
        "channel": ("web", "shop", "post"),
        "category": ("toys", "audio", "garden", "books"),
    },
    intro="A refund is asked for:",
    rules=(
        "The decision is APPROVE when the amount is over 170, otherwise it is REVIEW.",
        "When days is over 65 the decision is always DENY.",
        "The percent is 90 for a gold customer, 70 for a basic customer and 55 for a plus "
        "customer.",
        "For the channel shop the percent is lowered by 15.",
        "The approver is finance when days is over 30, otherwise the clerk.",
        "For the category audio the approver is always the lead.",
    ),
    wanted=_wanted,
    render=lambda p, r: " | ".join(p[k] for k in _PARTS),
    judge=line_judge(_PARTS, "|"),
)
