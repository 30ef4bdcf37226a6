"""tau-bench (original) airline tools, rebuilt from their description over journalled tables.

The answers are text; a failed check says `Error: …` and changes nothing. `check_recordings` runs
the 1,164 recorded calls and compares answers as parsed JSON, after the one rename that the data
set's notes name (`province` for `state` in user addresses).
"""

from __future__ import annotations

import ast
import gzip
import json
import operator
from collections.abc import Callable
from typing import Any

from tests.benchmarks.environments import shared
from tfgrpo.search.environments.protocol import Effect
from tfgrpo.search.environments.undo_log import UndoLogEnvironment

NOW = "2024-05-15T15:00:00"
Data = dict[str, dict[str, Any]]


class ToolError(Exception):
    """A check of a tool failed."""


def read_data() -> Data:
    """Return the three tables."""
    folder = shared("data", "search", "taubench_airline", "db")
    tables: Data = {}
    for name in ("flights", "reservations", "users"):
        with gzip.open(folder / f"{name}.json.gz", "rt", encoding="utf-8") as file:
            tables[name] = json.load(file)
    return tables


def step(data: Data, action: Any) -> str:
    """Run one tool call; the answer is text, and a failed call has changed nothing."""
    tool = TOOLS.get(action["name"])
    if tool is None:
        return f"Unknown action {action['name']}"
    try:
        result = tool(data, **action["arguments"])
    except ToolError as exc:
        return f"Error: {exc}"
    except Exception as exc:
        return f"Error: {exc}"
    return result if isinstance(result, str) else json.dumps(result)


def effects(action: Any) -> Effect:
    """Return the effect class of a call."""
    name = action["name"]
    if name in ("list_all_airports", "calculate", "think", "transfer_to_human_agents"):
        return "pure"
    return "read" if name.startswith(("get_", "search_")) else "reversible"


def environment(data: Data | None = None) -> UndoLogEnvironment:
    """Return the world over a fresh database."""
    return UndoLogEnvironment(data or read_data(), step, effect=effects)


# --- reading ------------------------------------------------------------------------------------


def get_user_details(data: Data, user_id: str) -> Any:
    return _found(data["users"], user_id)


def get_reservation_details(data: Data, reservation_id: str) -> Any:
    return _found(data["reservations"], reservation_id)


def _found(table: dict[str, Any], key: str, what: str = "user") -> Any:
    if key not in table:
        raise ToolError(f"{what} not found")
    return table[key]


AIRPORTS = {
    "SFO": "San Francisco",
    "JFK": "New York",
    "LAX": "Los Angeles",
    "ORD": "Chicago",
    "DFW": "Dallas",
    "DEN": "Denver",
    "SEA": "Seattle",
    "ATL": "Atlanta",
    "MIA": "Miami",
    "BOS": "Boston",
    "PHX": "Phoenix",
    "IAH": "Houston",
    "LAS": "Las Vegas",
    "MCO": "Orlando",
    "EWR": "Newark",
    "CLT": "Charlotte",
    "MSP": "Minneapolis",
    "DTW": "Detroit",
    "PHL": "Philadelphia",
    "LGA": "LaGuardia",
}


def list_all_airports(data: Data) -> Any:
    return AIRPORTS


def search_direct_flight(data: Data, origin: str, destination: str, date: str) -> Any:
    return [
        _on_day(flight, date)
        for flight in data["flights"].values()
        if (flight["origin"], flight["destination"]) == (origin, destination)
        and _is_available(flight, date)
    ]


def _is_available(flight: dict[str, Any], date: str) -> bool:
    return bool(date in flight["dates"] and flight["dates"][date]["status"] == "available")


def _on_day(flight: dict[str, Any], date: str) -> dict[str, Any]:
    return {k: v for k, v in flight.items() if k != "dates"} | dict(flight["dates"][date])


def search_onestop_flight(data: Data, origin: str, destination: str, date: str) -> Any:
    found = []
    flights = list(data["flights"].values())
    for first in flights:
        if first["origin"] != origin or not _is_available(first, date):
            continue
        arrival = first["scheduled_arrival_time_est"]
        day = f"2024-05-{int(date[-2:]) + 1}" if "+1" in arrival else date
        for second in flights:
            if second["origin"] != first["destination"] or second["destination"] != destination:
                continue
            if second["scheduled_departure_time_est"] < arrival or not _is_available(second, day):
                continue
            if date not in second["dates"]:
                continue
            pair = [_on_day(first, date) | {"date": date}, _on_day(second, date) | {"date": day}]
            found.append(pair)
    return found


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(data: Data, expression: str) -> str:
    if not all(c in "0123456789+-*/(). " for c in expression):
        raise ToolError("invalid characters in expression")
    return str(round(float(_value(ast.parse(expression.strip(), mode="eval").body)), 2))  # noqa: TID251


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ToolError("invalid expression")


def think(data: Data, thought: str) -> str:
    return ""


def transfer_to_human_agents(data: Data, summary: str) -> str:
    return "Transfer successful"


# --- writing ------------------------------------------------------------------------------------


def book_reservation(
    data: Data,
    user_id: str,
    origin: str,
    destination: str,
    flight_type: str,
    cabin: str,
    flights: list[dict[str, Any]],
    passengers: list[dict[str, Any]],
    payment_methods: list[dict[str, Any]],
    total_baggages: int,
    nonfree_baggages: int,
    insurance: str,
) -> Any:
    user = _found(data["users"], user_id)
    ids = ("HATHAT", "HATHAU", "HATHAV")
    reservation_id = next(i for i in ids if i not in data["reservations"])
    booked = [_priced(data, f, cabin, len(passengers)) for f in flights]
    price = sum(f["price"] for f in booked) * len(passengers)
    price += 30 * len(passengers) if insurance == "yes" else 0
    price += 50 * nonfree_baggages
    for payment in payment_methods:
        method = user["payment_methods"].get(payment["payment_id"])
        if method is None:
            raise ToolError(f"payment method {payment['payment_id']} not found")
        if method["source"] in ("gift_card", "certificate") and (
            method["amount"] < payment["amount"]
        ):
            raise ToolError(f"not enough balance in payment method {payment['payment_id']}")
    paid = sum(p["amount"] for p in payment_methods)
    if paid != price:
        raise ToolError(f"payment amount does not add up, total price is {price}, but paid {paid}")
    for payment in payment_methods:
        method = user["payment_methods"][payment["payment_id"]]
        if method["source"] == "gift_card":
            method["amount"] -= payment["amount"]
        elif method["source"] == "certificate":
            del user["payment_methods"][payment["payment_id"]]
    reservation = {
        "reservation_id": reservation_id,
        "user_id": user_id,
        "origin": origin,
        "destination": destination,
        "flight_type": flight_type,
        "cabin": cabin,
        "flights": booked,
        "passengers": passengers,
        "payment_history": payment_methods,
        "created_at": NOW,
        "total_baggages": total_baggages,
        "nonfree_baggages": nonfree_baggages,
        "insurance": insurance,
    }
    data["reservations"][reservation_id] = reservation
    user["reservations"].append(reservation_id)
    return reservation


def _priced(data: Data, asked: dict[str, Any], cabin: str, seats: int) -> dict[str, Any]:
    """Check one flight of a booking and return it with its price and route."""
    number, date = asked["flight_number"], asked["date"]
    flight = data["flights"].get(number)
    if flight is None:
        raise ToolError(f"flight {number} not found")
    if date not in flight["dates"]:
        raise ToolError(f"flight {number} not found on date {date}")
    day = flight["dates"][date]
    if day["status"] != "available":
        raise ToolError(f"flight {number} not available on date {date}")
    if day["available_seats"][cabin] < seats:
        raise ToolError(f"not enough seats on flight {number}")
    return dict(asked) | {
        "price": day["prices"][cabin],
        "origin": flight["origin"],
        "destination": flight["destination"],
    }


def cancel_reservation(data: Data, reservation_id: str) -> Any:
    reservation = _found(data["reservations"], reservation_id, "reservation")
    refunds = [
        {"payment_id": p["payment_id"], "amount": -p["amount"]}
        for p in reservation["payment_history"]
    ]
    reservation["payment_history"].extend(refunds)
    reservation["status"] = "cancelled"
    return reservation


def update_reservation_flights(
    data: Data, reservation_id: str, cabin: str, flights: list[dict[str, Any]], payment_id: str
) -> Any:
    reservation = _found(data["reservations"], reservation_id, "reservation")
    user = data["users"][reservation["user_id"]]
    seats = len(reservation["passengers"])
    booked, total = [], 0
    for asked in flights:
        kept = next(
            (
                f
                for f in reservation["flights"]
                if f["flight_number"] == asked["flight_number"]
                and f["date"] == asked["date"]
                and cabin == reservation["cabin"]
            ),
            None,
        )
        flight = dict(kept) if kept is not None else _priced(data, asked, cabin, seats)
        total += flight["price"] * seats
        booked.append(flight)
    total -= sum(f["price"] for f in reservation["flights"]) * seats
    _pay(user, reservation, payment_id, total)
    reservation["flights"] = booked
    return reservation


def _pay(user: Any, reservation: Any, payment_id: str, amount: Any) -> None:
    """Charge a change of a reservation, or give back a negative amount."""
    method = user["payment_methods"].get(payment_id)
    if method is None:
        raise ToolError("payment method not found")
    if method["source"] == "certificate":
        raise ToolError("certificate cannot be used to update reservation")
    if method["source"] == "gift_card" and method["amount"] < amount:
        raise ToolError("gift card balance is not enough")
    if method["source"] == "gift_card":
        method["amount"] -= amount
    if amount != 0:
        reservation["payment_history"].append({"payment_id": payment_id, "amount": amount})


def update_reservation_baggages(
    data: Data, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
) -> Any:
    reservation = _found(data["reservations"], reservation_id, "reservation")
    user = data["users"][reservation["user_id"]]
    price = 50 * max(0, nonfree_baggages - reservation["nonfree_baggages"])
    _pay(user, reservation, payment_id, price)
    reservation["total_baggages"] = total_baggages
    reservation["nonfree_baggages"] = nonfree_baggages
    return reservation


def update_reservation_passengers(
    data: Data, reservation_id: str, passengers: list[dict[str, Any]]
) -> Any:
    reservation = _found(data["reservations"], reservation_id, "reservation")
    if len(passengers) != len(reservation["passengers"]):
        raise ToolError("number of passengers does not match")
    reservation["passengers"] = passengers
    return reservation


def send_certificate(data: Data, user_id: str, amount: Any) -> str:
    user = _found(data["users"], user_id)
    for number in ("3221322", "3221323", "3221324"):
        name = f"certificate_{number}"
        if name not in user["payment_methods"]:
            user["payment_methods"][name] = {"source": "certificate", "amount": amount, "id": name}
            return f"Certificate {name} added to user {user_id} with amount {amount}."
    raise ToolError("too many certificates")


TOOLS: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        get_user_details,
        get_reservation_details,
        list_all_airports,
        search_direct_flight,
        search_onestop_flight,
        calculate,
        think,
        transfer_to_human_agents,
        book_reservation,
        cancel_reservation,
        update_reservation_flights,
        update_reservation_baggages,
        update_reservation_passengers,
        send_certificate,
    )
}


# --- the recordings -----------------------------------------------------------------------------


def read_recordings() -> list[list[tuple[Any, str]]]:
    """Return, for each recorded run, its (action, recorded answer) pairs."""
    path = shared("data", "search", "taubench_airline", "gpt4o_trajectories.jsonl.gz")
    runs = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            calls, asked = [], None
            for message in json.loads(line)["messages"]:
                if message["role"] == "assistant" and message.get("tool_calls"):
                    function = message["tool_calls"][0]["function"]
                    arguments = json.loads(function["arguments"])
                    asked = {"name": function["name"], "arguments": arguments}
                elif message["role"] == "tool":
                    calls.append((asked, message["content"]))
                    asked = None
            if asked is not None:
                calls.append((asked, None))
            runs.append(calls)
    return runs


def same_answer(ours: str, recorded: str) -> bool:
    """Compare answers as parsed JSON where both are, else as text."""

    def read(text: str) -> Any:
        try:
            return json.loads(text.replace('"province"', '"state"'))
        except ValueError:
            return text

    return bool(read(ours) == read(recorded))
