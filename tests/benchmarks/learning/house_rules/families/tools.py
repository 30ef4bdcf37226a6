"""Tool arguments and call order: a request becomes a list of three calls."""

from __future__ import annotations

import json

from tests.benchmarks.learning.house_rules.families.family import (
    Case,
    Family,
    Parts,
    Record,
    same,
)

_PARTS = ("opening", "action", "reason", "mode", "closing")
_ACTION = {
    "cancel order": "send_replacement",
    "money back": "book_credit",
    "new item": "send_replacement",
    "change address": "book_credit",
    "complaint": "open_claim",
}
_REASON = {"toys": "R7", "audio": "R2", "garden": "R5", "books": "R2"}


def _wanted(r: Record) -> Parts:
    opening = "check_stock" if r["tier"] == "gold" else "check_identity"
    if float(r["amount"]) > 150:
        opening = "ask_lead"
    mode = {"north": "slow", "south": "express", "islands": "slow"}[r["region"]]
    return {
        "opening": opening,
        "action": "open_claim" if r["contact"] == "fax" else _ACTION[r["wish"]],
        "reason": _REASON[r["category"]],
        "mode": "courier" if r["tier"] == "gold" else mode,
        "closing": "write_note" if r["contact"] in ("mail", "fax") else "send_survey",
    }


def _render(p: Parts, r: Record) -> str:
    args = {"order": r["order"], "reason": p["reason"], "mode": p["mode"]}
    return json.dumps(
        [
            {"tool": p["opening"], "args": {"order": r["order"]}},
            {"tool": p["action"], "args": args},
            {"tool": p["closing"], "args": {"order": r["order"]}},
        ]
    )


def _judge(reply: str, case: Case) -> dict[str, bool]:
    start, end = reply.find("["), reply.rfind("]")
    try:
        calls = json.loads(reply[start : end + 1])
        opening, action, closing = (str(c["tool"]) for c in calls)
        args = calls[1].get("args", {})
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    found = {"opening": opening, "action": action, "closing": closing,
             "reason": str(args.get("reason", "")), "mode": str(args.get("mode", ""))}  # fmt: skip
    return {p: same(v, case.parts[p]) for p, v in found.items()}


TOOLS = Family(
    name="tools",
    system=(
        "You serve the requests of a shop by calls of tools. The answer has the parts opening, "
        "action, reason, mode and closing, written as a JSON list of three calls, each "
        '{"tool": name, "args": {"order": number}}, and nothing else: opening, action and closing '
        "are the tools of the first, second and third call, reason and mode are further arguments "
        "of the second call. opening is one of check_identity, check_stock, ask_lead. action is "
        "one of book_credit, send_replacement, open_claim. reason is one of R2, R5, R7. mode is "
        "one of slow, express, courier. closing is one of write_note, send_survey."
    ),
    description="Requests to a shop become three tool calls in order, with their arguments.",
    parts=_PARTS,
    fields={
        "wish": tuple(_ACTION),
        "tier": ("basic", "gold", "plus"),
        "amount": tuple(str(a) for a in range(20, 240, 20)),
        "category": tuple(_REASON),
        "region": ("north", "south", "islands"),
        "contact": ("mail", "phone", "fax", "chat"),
        "order": tuple(f"A{n}" for n in range(11, 47)),
    },
    intro="A customer writes:",
    rules=(
        "The opening is check_stock for tier gold, otherwise check_identity.",
        "When the amount is over 150 the opening is always ask_lead.",
        "For the wish cancel order or new item the action is send_replacement, for money back or "
        "change address it is book_credit, for complaint it is open_claim.",
        "When the contact is fax the action is always open_claim.",
        "The reason is R7 for toys, R2 for audio, R5 for garden and R2 for books.",
        "The mode is express for region south, otherwise slow.",
        "For tier gold the mode is always courier.",
        "The closing is write_note for contact mail or fax, otherwise send_survey.",
    ),
    wanted=_wanted,
    render=_render,
    judge=_judge,
)
