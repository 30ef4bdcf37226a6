"""The parts of a running gateway, put together from its settings; everything else is given one.

Does not know HTTP. Source: own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tfgrpo.errors import ConfigError, TfgrpoError
from tfgrpo.experience.artefact import Artefact, load_artefact
from tfgrpo.lm import fleet_options
from tfgrpo.runtime.cooldown import Cooldowns
from tfgrpo.runtime.hosts import is_loopback
from tfgrpo.serve.access.booking import CallBook, read_spent
from tfgrpo.serve.access.caps import KeyCaps, Rates, Scope
from tfgrpo.serve.access.idempotency import Idempotency
from tfgrpo.serve.access.keys import ANYBODY, KeyRing
from tfgrpo.serve.access.tokens import FeedbackTokens
from tfgrpo.serve.choosing import open_chooser
from tfgrpo.serve.identity import IdMaker, read_secret
from tfgrpo.serve.metrics import Metrics
from tfgrpo.serve.routes import Route
from tfgrpo.serve.settings import (
    BudgetSettings,
    GatewaySettings,
    KeySettings,
    RateSettings,
    RouteSettings,
    UpstreamSettings,
)
from tfgrpo.serve.tables import add_tables
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.serve.wire.opening import open_upstream
from tfgrpo.serve.wire.upstream import Upstream
from tfgrpo.store import Journal
from tfgrpo.store.prices import Price, PriceTable

log = logging.getLogger(__name__)

__all__ = ["Gateway", "Model", "check_listen", "check_prices", "embedded_settings", "split_address"]

_OPEN_KEY = KeySettings(hash="scrypt:")
"""What anybody may do where no keys are set."""
_ANY_RATE = RateSettings()


def shadow_key(route: str) -> str:
    """Return the name under which a route's shadow draws are booked; no key can have it."""
    return f"~shadow:{route}"


def learn_key(route: str) -> str:
    """Return the name under which a route's proposals are booked; no key can have it."""
    return f"~learn:{route}"


class Model:
    """An upstream with its price and limits."""

    def __init__(
        self, name: str, settings: UpstreamSettings, fleets: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.name = name
        self.settings = settings
        options = fleet_options(settings.lm, fleets) | settings.options
        self.upstream: Upstream = open_upstream(settings.lm, options)
        own = {self.upstream.spec: settings.price} if settings.price is not None else None
        self.price: Price | None = PriceTable(own).find(self.upstream.spec)
        self.limit_field = (
            "max_completion_tokens" if self.upstream.spec.startswith("openai:") else "max_tokens"
        )


class Gateway:
    """Everything a request needs.

    Args:
        settings: checked.

    Raises:
        ConfigError: a setting that cannot work: no keys off loopback, a money cap without a price,
            a library whose prompt would differ.
        StoreError: the folder cannot be used.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        check_listen(settings)
        self.settings = settings
        self.folder = Path(settings.serve.folder)
        self.models = {
            name: Model(name, row, settings.fleets) for name, row in settings.upstreams.items()
        }
        check_prices(settings, self.models)
        artefacts = {n: _load(r) for n, r in settings.routes.items()}
        self.journal = Journal.open(self.folder, create=True)
        try:
            add_tables(self.journal)
            self.secret = read_secret(self.folder)
            self.ids = IdMaker(self.secret)
            self.tokens = FeedbackTokens(self.secret)
            self.keys = KeyRing(settings.keys)
            self.rates = Rates()
            self.user_rates = Rates()
            self.caps = KeyCaps(read_spent(self.journal))
            self.book = CallBook(self.journal, self.caps)
            self.idempotency = Idempotency(self.journal, settings.serve.idempotency_h * 3600.0)
        except BaseException:
            self.journal.close()
            raise
        rest = max((m.settings.rest_s for m in self.models.values()), default=30.0)
        self.cooldowns = Cooldowns(cooldown_s=rest)
        self.metrics = Metrics()
        self.routes = {
            name: Route(name, row, self.secret, artefacts[name])
            for name, row in settings.routes.items()
        }
        for name, row in settings.routes.items():
            if row.router:
                specs = {u: self.models[u].upstream.spec for u in row.upstreams}
                self.routes[name].chooser = open_chooser(row.router, row.rule, specs)
        self._names: dict[str, Route] = {}
        self.name_routes()
        self._retired: list[Model] = []
        self.is_draining = False

    def name_routes(self) -> None:
        """Read which names lead to which route."""
        self._names = {
            alias: route
            for name, route in self.routes.items()
            for alias in (name, *route.settings.aliases)
        }

    def retire(self, models: Sequence[Model]) -> None:
        """Keep models that the settings name no more, for the requests that use them."""
        self._retired += models

    def key(self, name: str) -> KeySettings:
        """Return the settings of a key, or of work of the gateway's own."""
        if name == ANYBODY:
            return _OPEN_KEY
        if name.startswith("~"):
            return self._own_key(name)
        return self.settings.keys[name]

    def _own_key(self, name: str) -> KeySettings:
        kind, _, route = name.partition(":")
        learn = self.routes[route].settings.learn
        if kind == "~shadow" and learn is not None and learn.shadow is not None:
            return KeySettings(hash="scrypt:", budget=learn.shadow.budget)
        return _OPEN_KEY

    def route(self, model: object, key_name: str) -> Route:
        """Return the route that a client's `model` names.

        Raises:
            ApiError: 404; a route that the key may not use does not exist for it.
        """
        route = self._names.get(model) if isinstance(model, str) else None
        allowed = self.key(key_name).routes
        if route is None or (allowed and route.name not in allowed):
            raise ApiError(
                "model_not_found",
                f"the model {model!r:.100} does not exist here; GET /v1/models lists those that do",
                param="model",
            )
        return route

    def names_for(self, key_name: str) -> dict[str, Route]:
        """Return the routes and aliases that a key may name."""
        allowed = self.key(key_name).routes
        return {n: r for n, r in self._names.items() if not allowed or r.name in allowed}

    def scopes(self, route: Route, key_name: str, end_user: str) -> list[Scope]:
        """Return the owners of caps that a call counts against."""
        key = self.key(key_name)
        rows = [
            Scope("process", self.settings.serve.budget),
            Scope(f"route:{route.name}", route.settings.budget),
            Scope(f"key:{key_name}", key.budget),
        ]
        if end_user:
            rows.append(Scope(f"user:{key_name}/{end_user}", key.user_budget))
        return rows

    def all_scopes(self) -> list[Scope]:
        """Return the owners of caps that the settings name, for the page."""
        return [
            Scope("process", self.settings.serve.budget),
            *(Scope(f"route:{n}", r.settings.budget) for n, r in self.routes.items()),
            *(Scope(f"key:{n}", k.budget) for n, k in self.settings.keys.items()),
            *(
                Scope(f"key:{shadow_key(n)}", r.settings.learn.shadow.budget)
                for n, r in self.routes.items()
                if r.settings.learn is not None and r.settings.learn.shadow is not None
            ),
        ]

    @contextmanager
    def user_rate(self, key_name: str, end_user: str) -> Iterator[None]:
        """Count a request of an end user while the block runs (`ApiError` where it is too much)."""
        rate = self.key(key_name).user_rate
        if not end_user or rate == _ANY_RATE:
            yield
            return
        name = f"{key_name}/{end_user}"
        self.user_rates.enter(name, rate, self.settings.serve.in_flight)
        try:
            yield
        finally:
            self.user_rates.leave(name)

    def has_money_cap(self, route: Route, key_name: str) -> bool:
        """True where the worst case of a call must hold."""
        key = self.key(key_name)
        rows = (self.settings.serve.budget, route.settings.budget, key.budget, key.user_budget)
        return any(row.has_money for row in rows)

    def resting(self, route: Route) -> list[str]:
        """Return the upstreams of a route that are left alone now."""
        names = route.settings.upstreams
        return [n for n in names if self.cooldowns.state(n) == "cooling"]

    @property
    def is_busy(self) -> bool:
        """True where work in the background should wait."""
        return self.rates.total > 0.8 * self.settings.serve.in_flight or bool(self.not_ready())

    def not_ready(self) -> list[str]:
        """Return why the gateway is not ready; empty where it is."""
        why = ["it is draining"] if self.is_draining else []
        for route in self.routes.values():
            if len(self.resting(route)) == len(route.settings.upstreams):
                why.append(f"every upstream of route {route.name} is resting")
        try:
            self.journal.writer.flush()
        except TfgrpoError as exc:
            why.append(f"the journal cannot be written: {exc}")
        return why

    def notes(self) -> list[str]:
        """Return what is wrong and keeps nobody from being served."""
        return [f"route {r.name}: {r.note}" for r in self.routes.values() if r.note]

    async def aclose(self) -> None:
        """Close upstreams and journal."""
        for model in (*self.models.values(), *self._retired):
            await model.upstream.aclose()
        self.journal.close()


def embedded_settings(folder: str = "runs/gateway") -> GatewaySettings:
    """Return the settings of a gateway without a file: the embedded model, an empty library."""
    return GatewaySettings.from_mapping(
        {
            "serve": {"folder": folder},
            "upstreams": {"embedded": {"lm": "local:smollm2-135m"}},
            "routes": {
                "default": {
                    "upstreams": ["embedded"],
                    "aliases": ["smollm2-135m"],
                    "capture": True,
                }
            },
        }
    )


def split_address(address: str) -> tuple[str, int]:
    """Return host and port.

    Raises:
        ConfigError: not of the form HOST:PORT.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"address {address!r} is not HOST:PORT, such as 127.0.0.1:8080")
    return host.strip("[]"), int(port)


def check_listen(settings: GatewaySettings) -> None:
    """Refuse addresses that others reach without keys (`ConfigError`)."""
    host, _ = split_address(settings.serve.listen)
    if not settings.keys and not is_loopback(host):
        raise ConfigError(
            f"serve.listen {settings.serve.listen!r} can be reached from outside: add a key "
            "(`tfgrpo serve key new NAME`) or listen on 127.0.0.1"
        )
    if settings.serve.admin_listen:
        host, _ = split_address(settings.serve.admin_listen)
        if not is_loopback(host):
            raise ConfigError(
                f"serve.admin_listen {settings.serve.admin_listen!r}: the page is for this machine "
                "only; use 127.0.0.1 and a tunnel"
            )


def check_prices(settings: GatewaySettings, models: Mapping[str, Model]) -> None:
    """Refuse a money cap over a model without a price (`ConfigError`)."""
    shared = [settings.serve.budget, *(b for k in settings.keys.values() for b in
                                       (k.budget, k.user_budget))]  # fmt: skip
    for name, route in settings.routes.items():
        shadow = route.learn.shadow if route.learn is not None else None
        own = (route.budget,) if shadow is None else (route.budget, shadow.budget)
        if not any(b.has_money for b in (*shared, *own)):
            continue
        if route.on_cancel == "seen":
            raise ConfigError(
                f"routes.{name}.on_cancel: under a money cap a stream that was left counts at its "
                'worst case; use "worst"'
            )
        is_held = settings.serve.budget.has_money or route.budget.has_money
        if is_held and route.learn is not None and route.learn.enabled and route.learn.usd is None:
            raise ConfigError(
                f"routes.{name}.learn: set usd, what one proposal may spend: the caps of the "
                "route and the process hold for learning too"
            )
        for upstream in route.upstreams:
            if models[upstream].price is None:
                spec = models[upstream].upstream.spec
                raise ConfigError(
                    f"routes.{name} is under a money cap, but the price of upstream {upstream!r} "
                    f"({spec}) is unknown: set upstreams.{upstream}.price "
                    "(input and output in dollars per million tokens)"
                )


def _load(route: RouteSettings) -> Artefact | None:
    return load_artefact(route.library) if route.library else None


def budget_of(settings: BudgetSettings) -> dict[str, float]:
    """Return the limits that are set, for the page."""
    return {k: v for k, v in settings.model_dump().items() if v is not None}
