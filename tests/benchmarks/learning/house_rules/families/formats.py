"""Formats and normalisation: a person's entry becomes one line in the house's notation."""

from __future__ import annotations

from datetime import datetime

from tests.benchmarks.learning.house_rules.families.family import Family, Parts, Record, line_judge

_PARTS = ("name", "date", "amount", "code", "group")
_GROUP = {"loan": "K4", "gift": "K9", "rent": "K1"}


def _wanted(r: Record) -> Parts:
    first, surname = r["name"].split()
    day = datetime.strptime(r["date"], "%d %B %Y")
    date = day.strftime("%Y-%m-%d") if r["country"] == "Chile" else day.strftime("%Y/%m/%d")
    cents = f"{float(r['amount']):.2f}".replace(".", "")
    amount = r["amount"] if r["kind"] == "loan" else cents
    code = r["code"].replace("-", "").upper()
    return {
        "name": f"{surname.upper()}, {first.capitalize()}",
        "date": date,
        "amount": amount,
        "code": code,
        "group": _GROUP[r["kind"]],
    }


_NAMES = ("maria lopez", "ian berg", "ruth okafor", "pavel novak", "lea martin", "sam ito",
          "nora lind", "omar haddad", "eva klein", "jon price", "ada wirth",
          "tom falk")  # fmt: skip
_DATES = ("3 March 2024", "14 July 2023", "9 May 2022", "21 January 2024", "30 June 2021",
          "7 August 2023", "12 October 2022", "5 April 2021", "18 December 2023",
          "26 February 2022", "2 November 2024", "11 September 2021")  # fmt: skip

FORMATS = Family(
    name="formats",
    system=(
        "You bring entries into the house's notation. The answer has the parts name, date, amount, "
        "code and group, written on one line as name | date | amount | code | group and nothing "
        "else. group is one of K1, K4, K9."
    ),
    description="Entries of a ledger are rewritten in the notation of the house.",
    parts=_PARTS,
    fields={
        "name": _NAMES,
        "date": _DATES,
        "amount": ("1250.50", "80.25", "312.75", "46.10", "905.30", "17.85", "2200.40", "630.95"),
        "code": ("ab-12", "kx-77", "qd-05", "mz-31", "rt-68", "vv-90"),
        "kind": tuple(_GROUP),
        "country": ("Norway", "Chile", "Kenya", "Japan"),
    },
    intro="Rewrite this entry:",
    rules=(
        "Names are written as SURNAME, First.",
        "Dates are written as YYYY/MM/DD.",
        "When the country is Chile the date is always written as YYYY-MM-DD.",
        "Amounts are written in cents.",
        "When the kind is loan the amount is always written with two decimals.",
        "Codes are written in upper case without hyphen.",
        "The group is K4 for the kind loan, K9 for gift and K1 for rent.",
    ),
    wanted=_wanted,
    render=lambda p, r: " | ".join(p[k] for k in _PARTS),
    judge=line_judge(_PARTS, "|"),
)
