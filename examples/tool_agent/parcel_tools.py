"""The tools of a parcel desk: plain Python functions, made into tools by their signatures.

The agent has to find out, or be told, that the register keeps weights in grams.
"""

from __future__ import annotations

from tfgrpo.rollout import Rollout, Task

PARCELS = {
    f"P{100 + i}": {"grams": 250 * (2 + (i * 7) % 23), "country": country}
    for i, country in enumerate(["Norway", "Chile", "Japan", "Kenya", "Italy"] * 12)
}
RATES = {"Norway": 4, "Chile": 9, "Japan": 8, "Kenya": 7, "Italy": 3}


def find_parcel(parcel_id: str) -> dict[str, object]:
    """Look a parcel up.

    Args:
        parcel_id: such as P117
    """
    if parcel_id not in PARCELS:
        raise ValueError(f"no parcel {parcel_id!r}")
    found = PARCELS[parcel_id]
    return {"id": parcel_id, "weight": found["grams"], "country": found["country"]}


def postage(weight_kg: float, country: str) -> float:
    """Compute the postage in euros.

    Args:
        weight_kg: weight in kilograms
        country: where the parcel goes
    """
    if country not in RATES:
        raise ValueError(f"no rate for {country!r}; rates: {', '.join(RATES)}")
    return 5 + RATES[country] * weight_kg


def right_answer(parcel_id: str) -> float:
    """Return what a careful clerk would say."""
    parcel = PARCELS[parcel_id]
    return 5 + RATES[str(parcel["country"])] * int(str(parcel["grams"])) / 1000


def score(rollout: Rollout, task: Task) -> tuple[float, str]:
    """Judge the answer; a reward in halves, and words that a critic can use."""
    said = rollout.answer.replace(",", "").split()
    numbers = [w.strip("€.") for w in said if w.strip("€.").replace(".", "", 1).isdigit()]
    if not numbers:
        return 0.0, "the answer holds no number"
    if abs(float(numbers[-1]) - float(task.reference)) < 0.005:
        return 1.0, "right"
    return 0.5, f"a number, but {numbers[-1]} is not the postage"
