"""What clients and operators may read: models, one response's figures, health, metrics.

Does not know how replies are made. Source: the models format; own.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from tfgrpo.serve.gateway import Gateway
from tfgrpo.serve.identity import bare_id
from tfgrpo.serve.routes import Route
from tfgrpo.serve.tables import rows_as_dicts
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.serve.wire.fleet import FleetUpstream
from tfgrpo.serve.wire.http import Http

__all__ = ["health", "known_response", "metrics", "model", "models", "ready", "response", "schema"]


def _row(name: str, route: Route) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": f"tfgrpo:{route.name}"}


async def models(gateway: Gateway, http: Http, key_name: str) -> None:
    """`GET /v1/models`: routes and aliases that the key may use."""
    rows = [_row(name, route) for name, route in gateway.names_for(key_name).items()]
    await http.json(200, {"object": "list", "data": rows})


async def model(gateway: Gateway, http: Http, key_name: str, name: str) -> None:
    """`GET /v1/models/{id}`."""
    await http.json(200, _row(name, gateway.route(name, key_name)))


def known_response(gateway: Gateway, text: str, key_name: str) -> dict[str, Any]:
    """Return the request row of a response id.

    Raises:
        ApiError: 404 for one that was never issued or is another key's, 410 for one whose rows
            were purged.
    """
    core = bare_id(text)
    if not core or not gateway.ids.is_ours(core):
        raise ApiError("unknown_response", f"no response {text!r:.80} was ever given here")
    rows = rows_as_dicts(
        gateway.journal,
        "SELECT response_id, at, endpoint, route, key, end_user, task_id, session_id, group_id,"
        " unit, experiment, arm, share, prediction, library, context, metadata, task_digest"
        " FROM requests WHERE response_id = ?",
        (core,),
    )
    if not rows:
        raise ApiError("gone", f"the response {text!r:.80} is no longer kept")
    if rows[0]["key"] != key_name:
        raise ApiError("unknown_response", f"no response {text!r:.80} was ever given here")
    return rows[0]


async def response(gateway: Gateway, http: Http, key_name: str, text: str) -> None:
    """`GET /tfgrpo/v1/responses/{id}`: figures of one response, no content."""
    row = known_response(gateway, text, key_name)
    for name in ("key", "end_user", "unit", "prediction", "share"):
        row.pop(name)
    ends = rows_as_dicts(
        gateway.journal,
        "SELECT status, state, upstream, model, cost_usd, calls, duration_s, error FROM replies"
        " WHERE response_id = ?",
        (row["response_id"],),
    )
    usage = rows_as_dicts(
        gateway.journal,
        "SELECT r.kind, r.calls, r.uncached, r.cache_read, r.cache_write, r.text, r.reasoning,"
        " r.estimated, r.cost_usd FROM calls c JOIN results r ON r.call = c.call"
        " WHERE c.rollout_id = ?",
        (row["response_id"],),
    )
    await http.json(200, {**row, **(ends[0] if ends else {"state": "running"}), "attempts": usage})


async def health(http: Http) -> None:
    """`GET /health`: the process answers."""
    await http.json(200, {"status": "ok"})


@cache
def _schema() -> bytes:
    return files("tfgrpo.serve").joinpath("openapi.json").read_bytes()


async def schema(http: Http) -> None:
    """`GET /openapi.json`: what is served here."""
    await http.reply(200, _schema())


async def ready(gateway: Gateway, http: Http) -> None:
    """`GET /ready`: it can serve."""
    why = gateway.not_ready()
    status = "not ready" if why else "ready"
    await http.json(503 if why else 200, {"status": status, "why": why, "notes": gateway.notes()})


async def metrics(gateway: Gateway, http: Http) -> None:
    """`GET /metrics`: counters as text."""
    gateway.metrics.set("in_flight", gateway.rates.total)
    gateway.metrics.set("failed_writes", gateway.book.failed_writes)
    for name, model in gateway.models.items():
        if isinstance(model.upstream, FleetUpstream):
            _set_fleet(gateway, name, model.upstream.fleet.figures())
    text = gateway.metrics.text().encode()
    await http.reply(200, text, content_type=b"text/plain; version=0.0.4; charset=utf-8")


def _set_fleet(gateway: Gateway, upstream: str, figures: dict[str, Any]) -> None:
    gateway.metrics.set("fleet_hedges", figures["hedges"], {"upstream": upstream})
    for url, row in figures["servers"].items():
        labels = {"upstream": upstream, "server": url}
        gateway.metrics.set("fleet_server_up", float(row["state"] == "up"), labels)
        for name in ("in_flight", "calls", "failures", "rests"):
            gateway.metrics.set(f"fleet_server_{name}", row[name], labels)
