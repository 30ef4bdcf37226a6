"""Reads the settings anew while the gateway runs: all of them, or none.

Routes, upstreams, keys and caps change; running requests end with what they began with, sessions
and live tests go on. A library that cannot be loaded leaves its route on the one in force, which
the page and `/ready` name. Folder and addresses stay until a restart.

Does not know signals or files. Source: own.
"""

from __future__ import annotations

import logging

from tfgrpo.errors import TfgrpoError
from tfgrpo.experience.artefact import Artefact, load_artefact
from tfgrpo.runtime.redaction import redact
from tfgrpo.serve.access.keys import KeyRing
from tfgrpo.serve.choosing import open_chooser
from tfgrpo.serve.gateway import Gateway, Model, check_listen, check_prices
from tfgrpo.serve.learning.service import Learning
from tfgrpo.serve.routes import Chooser, Route
from tfgrpo.serve.settings import GatewaySettings, RouteSettings

log = logging.getLogger(__name__)

__all__ = ["apply_settings"]

_FIXED = ("folder", "listen", "admin_listen", "admin_key_env")


def apply_settings(gateway: Gateway, learning: Learning, settings: GatewaySettings) -> list[str]:
    """Let a running gateway go on with other settings; return what stays as it was, in words.

    Raises:
        TfgrpoError: they cannot work; nothing has changed.
    """
    before = gateway.settings
    kept = {name: getattr(before.serve, name) for name in _FIXED}
    notes = [
        f"serve.{name} changes with a restart only"
        for name in _FIXED
        if getattr(settings.serve, name) != kept[name]
    ]
    serve = settings.serve.model_copy(update=kept)
    settings = settings.model_copy(update={"serve": serve})
    check_listen(settings)
    keys = KeyRing(settings.keys)
    models = {name: _model(gateway, name, settings) for name in settings.upstreams}
    check_prices(settings, models)
    choosers = {n: _chooser(row, models) for n, row in settings.routes.items()}
    # From here on nothing fails.
    retired = [m for n, m in gateway.models.items() if models.get(n) is not m]
    gateway.retire(retired)
    gateway.settings, gateway.models, gateway.keys = settings, models, keys
    for name in [n for n in gateway.routes if n not in settings.routes]:
        del gateway.routes[name]
    for name, row in settings.routes.items():
        notes += _route(gateway, name, row, choosers[name])
    gateway.name_routes()
    learning.follow()
    return notes


def _model(gateway: Gateway, name: str, settings: GatewaySettings) -> Model:
    """Return the running model where nothing of it changed, else a new one."""
    row, found = settings.upstreams[name], gateway.models.get(name)
    is_same = found is not None and found.settings == row
    if found is not None and is_same and settings.fleets == gateway.settings.fleets:
        return found
    return Model(name, row, settings.fleets)


def _chooser(row: RouteSettings, models: dict[str, Model]) -> Chooser | None:
    if not row.router:
        return None
    return open_chooser(row.router, row.rule, {u: models[u].upstream.spec for u in row.upstreams})


def _route(gateway: Gateway, name: str, row: RouteSettings, chooser: Chooser | None) -> list[str]:
    """Change one route; return what is wrong with its library."""
    route = gateway.routes.get(name)
    artefact: Artefact | None = None
    note = ""
    try:
        artefact = load_artefact(row.library) if row.library else None
    except TfgrpoError as exc:
        note = redact(f"its library stays as it was: {exc}")
        artefact = route.configured if route is not None else None
    if route is None:
        route = gateway.routes[name] = Route(name, row, gateway.secret, artefact)
    route.settings, route.chooser, route.note = row, chooser, note
    if _version(artefact) != _version(route.configured):
        route.configure(artefact)
    return [f"route {name}: {note}"] if note else []


def _version(artefact: Artefact | None) -> str:
    return "" if artefact is None else artefact.library.version_id
