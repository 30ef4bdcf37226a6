"""The gateway's settings: one frozen model a section, TOML only, every mistake named.

Order: file over defaults; the environment holds keys only. Paths are relative to the file.
Does not know how a setting is used. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError

from tfgrpo.config.sections import Section, explain, load_toml, resolve_fleets, wrong_verb
from tfgrpo.errors import ConfigError
from tfgrpo.verifiers.factory import GROUP_KINDS

__all__ = ["GatewaySettings", "KeySettings", "LearnSettings", "RouteSettings", "UpstreamSettings"]

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME)]


class BudgetSettings(Section):
    """A cap on money or calls. Windows are UTC days; what is in flight counts at its worst."""

    usd_per_day: float | None = Field(default=None, ge=0)
    """Dollars a UTC day."""
    usd_total: float | None = Field(default=None, ge=0)
    """Dollars in all."""
    calls_per_day: int | None = Field(default=None, ge=0)
    """Requests to models a UTC day."""

    @property
    def has_money(self) -> bool:
        """True where dollars are limited, so that prices must be known."""
        return self.usd_per_day is not None or self.usd_total is not None


class RateSettings(Section):
    """How fast a key may ask."""

    per_minute: int | None = Field(default=None, ge=1)
    """Requests a minute; unset does not limit them."""
    in_flight: int = Field(default=256, ge=1)
    """Requests at once; more are refused."""


class ServeSettings(Section):
    """The process."""

    folder: str = Field(default="runs/gateway", min_length=1)
    """The journal; one process at a time."""
    listen: str = "127.0.0.1:8080"
    """Address of the API; anything but loopback needs keys."""
    admin_listen: str = "127.0.0.1:8081"
    """Address of the page and its commands; empty switches them off."""
    admin_key_env: str = "TFGRPO_ADMIN_KEY"
    """Environment variable with the secret of the page, of /metrics and of commands. Unset: a
    secret is made at the start and printed once."""
    hosts: tuple[str, ...] = ()
    """Further names that a `Host` header may hold, beside the address listened on."""
    max_body_bytes: int = Field(default=4_000_000, ge=1024)
    """Largest request body."""
    body_s: float = Field(default=30.0, gt=0)
    """Time in which a body must arrive."""
    hold_s: float = Field(default=10.0, ge=0)
    """How long a stream's headers wait for the first content, while failover is invisible."""
    comment_s: float = Field(default=15.0, gt=0)
    """Pause between comments that keep a waiting stream open."""
    drop_after_s: float = Field(default=30.0, gt=0)
    """A client that reads nothing for so long is left."""
    drain_s: float = Field(default=30.0, ge=0)
    """After TERM: time that running requests have to end."""
    in_flight: int = Field(default=2048, ge=1)
    """Requests at once over all keys; more are refused."""
    idempotency_h: float = Field(default=24.0, gt=0)
    """How long replies are kept under an Idempotency-Key."""
    budget: BudgetSettings = BudgetSettings()
    """Cap over all keys and routes."""


class UpstreamSettings(Section):
    """One model behind the gateway."""

    lm: str
    """Spec string, as everywhere: `openai:MODEL`, `http://HOST/v1#MODEL`, `fleet:NAME`, `local:…`.
    """
    options: dict[str, Any] = {}
    """Backend options, such as `api_key_env`."""
    price: dict[str, float] | None = None
    """Dollars per million tokens (`input`, `output`, …), over the package's table."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Wall time of one call."""
    context_tokens: int | None = Field(default=None, ge=256)
    """The model's window: a library that does not fit beside the prompt is left out."""
    rest_s: float = Field(default=30.0, ge=0)
    """How long the model is left alone after a failure of its host."""


class RuleSettings(Section):
    """How a router chooses: a target of success, or dollars against success."""

    target: float | None = Field(default=None, gt=0, lt=1)
    """The cheapest model whose predicted success (lower bound) reaches it."""
    per_usd: float | None = Field(default=None, ge=0)
    """The largest success − per_usd · cost."""


class FeedbackSettings(Section):
    """What clients report and how it counts."""

    metric: str = "reward"
    """The metric that is the reward; others are kept and shown."""
    low: float = 0.0
    """Least value of the metric; it counts as 0."""
    high: float = 1.0
    """Largest value of the metric; it counts as 1."""
    window_h: float = Field(default=24.0, gt=0)
    """How long an outcome may come after its reply to count in a live test."""
    missing: Literal["drop", "verifier"] | float = "drop"
    """What a response without feedback counts in a live test: left out, what the route's verifier
    says of it, or a number."""
    max_share: float = Field(default=0.2, gt=0, le=1)
    """Largest share of one step's evidence from one source (`source` or key)."""


class GroupSettings(Section):
    """How groups are made of traffic."""

    size: int = Field(default=4, ge=2)
    """A group closes when it has so many rollouts."""
    idle_s: float = Field(default=900.0, gt=0)
    """… or when nothing was added for so long."""
    repeat_h: float = Field(default=24.0, gt=0)
    """Window in which the same task id is a repeat."""
    task_identity: Literal["id", "messages"] = "id"
    """`messages`: equal messages are one task, where clients send no ids."""
    strict: bool = False
    """Refuse other messages under a known task id (409) instead of making a task of their own."""


class CanarySettings(Section):
    """The live test of a candidate."""

    shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.05, 0.2, 0.5)
    """Shares of traffic, growing."""
    min_units: int = Field(default=50, ge=1)
    """Units on a share before the next one."""
    max_units: int = Field(default=5000, ge=1)
    """Without a decision the candidate expires."""
    level: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance of a false promotion, over all candidates of the route."""
    min_difference: float = 0.0
    """The candidate must be better by at least this."""
    max_harm: float = Field(default=0.05, ge=0)
    """A candidate that is surely worse by more ends at once."""
    max_cost_factor: float = Field(default=2.0, gt=0)
    """Cost per unit of the candidate against the current library's."""


class ShadowSettings(Section):
    """Further draws of served requests, judged by the route's verifier."""

    group_size: int = Field(default=4, ge=2, le=17)
    """Draws of one request, the served reply among them."""
    usd_per_day: float | None = Field(default=None, gt=0)
    """Dollars a UTC day, beside the caps of the route and the process."""
    calls_per_day: int | None = Field(default=None, ge=1)
    """Requests to models a UTC day; one of the two caps must be set."""
    share: float = Field(default=0.1, gt=0, le=1)
    """Share of the requests for which no prediction is there."""
    mixed: tuple[float, float] = (0.2, 0.8)
    """Predicted success between which a request is worth drawing again."""

    @property
    def budget(self) -> BudgetSettings:
        """Its caps."""
        return BudgetSettings(usd_per_day=self.usd_per_day, calls_per_day=self.calls_per_day)


class LearnSettings(Section):
    """The background job that proposes libraries."""

    enabled: bool = True
    """False collects groups and proposes nothing."""
    critic: str = ""
    """Spec of the critic's LM; empty: the route's first upstream."""
    verifier: dict[str, Any] | None = None
    """For the offline gate and for draws that nobody rates."""
    feedback: FeedbackSettings = FeedbackSettings()
    min_informative: int = Field(default=8, ge=1)
    """Informative groups that start a proposal."""
    approve: Literal["before_canary", "before_promotion", "never"] = "before_canary"
    """When a person must agree."""
    group_size: int = Field(default=4, ge=1)
    """Draws a gate task for each arm of the offline gate."""
    usd: float | None = Field(default=None, gt=0)
    """Cap of one proposal, critic and gate together."""
    settings: dict[str, Any] = {}
    """Further settings of `[learn]` of a learning run."""
    expire_h: float = Field(default=168.0, gt=0)
    """A proposal that nobody answers for so long is dropped."""
    canary: CanarySettings = CanarySettings()
    shadow: ShadowSettings | None = None
    """Draw some served requests again, later, to learn from their differences."""
    drift: Literal["flag", "auto"] = "flag"
    """After a fall of outcomes: flag it, or also roll back where the holdout did not fall."""


class RouteSettings(Section):
    """What a client names as `model`."""

    upstreams: tuple[Name, ...] = Field(min_length=1)
    """In order of preference; the next one takes over where one fails before any content."""
    weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Shares of the upstreams, in their order: each session, task or request is tried first at one
    drawn by them. Unset keeps the order; not together with a router."""
    aliases: tuple[str, ...] = ()
    """Other names that clients may use for it."""
    library: str = ""
    """A learnt `library.json`, or the folder that holds it; its hash is checked."""
    holdout: float = Field(default=0.0, ge=0, le=0.5)
    """Share of units that never gets a library, so that its worth stays measured."""
    router: str = ""
    """A fitted router's folder: orders the upstreams for each prompt."""
    rule: RuleSettings = RuleSettings()
    capture: bool = False
    """Keep prompts and replies (secrets removed), which groups and learning need."""
    keep_days: float = Field(default=30.0, gt=0)
    """How long captured content is kept."""
    urls: Literal["refuse", "pass"] = "refuse"
    """Image and file URLs in prompts; we never fetch them."""
    max_samples: int = Field(default=8, ge=1, le=64)
    """Most draws of one request."""
    select: Literal["vote", "verifier", "judge"] = "vote"
    """How the best of several draws is chosen."""
    answer: str = "text"
    """What makes two draws agree: `text`, `number`, `last_line`, or `module:function`."""
    min_agreement: float = Field(default=0.5, ge=0, le=1)
    """Below this share of equal answers the reply says `x-tfgrpo-agreement: low`."""
    verifier: dict[str, Any] | None = None
    """For `select = "verifier"`."""
    judge: str = ""
    """Name of the upstream that judges, for `select = "judge"`."""
    max_reply_tokens: int = Field(default=4096, ge=1)
    """Worst case, and limit sent upstream, where a money cap holds and the client sets none."""
    on_cancel: Literal["worst", "seen"] = "worst"
    """What a stream that its client left is booked as: its worst case, kept apart, or an estimate
    from the prompt and what was seen of the reply. `seen` is not allowed under a money cap."""
    budget: BudgetSettings = BudgetSettings()
    feedback_tokens: bool = False
    """Give each reply a token with which a browser can rate it once."""
    groups: GroupSettings = GroupSettings()
    learn: LearnSettings | None = None


class KeySettings(Section):
    """One API key; `tfgrpo serve key new NAME` prints key and hash once."""

    hash: str = Field(pattern=r"^scrypt:")
    """What `tfgrpo serve key new NAME` printed; the key itself is kept nowhere."""
    routes: tuple[str, ...] = ()
    """Routes it may use; empty means all."""
    scopes: tuple[Literal["use", "feedback", "read"], ...] = ("use", "feedback", "read")
    """What the key may do: ask models, give feedback, read what happened."""
    budget: BudgetSettings = BudgetSettings()
    user_budget: BudgetSettings = BudgetSettings()
    """Cap of each end user under this key."""
    rate: RateSettings = RateSettings()
    user_rate: RateSettings = RateSettings()
    """How fast each end user under this key may ask."""
    expires: str = ""
    """UTC date (2027-01-31) from which it is refused."""


class GatewaySettings(Section):
    """Everything that a gateway can be told."""

    serve: ServeSettings = ServeSettings()
    fleets: dict[Name, dict[str, Any]] = {}
    """Servers of one model by the name that `fleet:NAME` gives them: `servers`, `model`."""
    upstreams: dict[Name, UpstreamSettings] = {}
    """Models by name."""
    routes: dict[Name, RouteSettings] = {}
    """What clients name as `model`, by name."""
    keys: dict[Name, KeySettings] = {}
    """API keys by the name of their owner."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "config") -> Self:
        """Check a nested mapping.

        Raises:
            ConfigError: naming each key, its value and the nearest known one.
        """
        try:
            settings = cls.model_validate(values)
        except ValidationError as exc:
            told = wrong_verb(values, "serve", source) + explain(exc, cls, source)
            raise ConfigError(told) from None
        _check_names(settings, source)
        return settings

    @classmethod
    def from_toml(cls, path: Path | str) -> Self:
        """Read a TOML file; folders and files in it are relative to it.

        Raises:
            ConfigError: the file is absent, not TOML, or a key is wrong.
        """
        values = _resolve_paths(load_toml(path), Path(path).parent)
        return cls.from_mapping(values, str(path))


def _resolve_paths(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    serve = values.get("serve")
    if isinstance(serve, dict) and isinstance(serve.get("folder"), str):
        serve["folder"] = str(folder / serve["folder"])
    resolve_fleets(values, folder)
    routes = values.get("routes")
    for route in routes.values() if isinstance(routes, dict) else ():
        for key in ("library", "router"):
            if isinstance(route, dict) and isinstance(route.get(key), str) and route[key]:
                route[key] = str(folder / route[key])
    return values


def _check_names(settings: GatewaySettings, source: str) -> None:
    """Refuse names that lead nowhere, and aliases that two routes claim."""
    taken: dict[str, str] = {}
    for name, route in settings.routes.items():
        judges = (route.judge,) if route.judge else ()
        for upstream in (*route.upstreams, *judges):
            if upstream not in settings.upstreams:
                known = ", ".join(settings.upstreams) or "none"
                raise ConfigError(
                    f"{source}: routes.{name} names the upstream {upstream!r}; known are {known}"
                )
        _refuse_group_kinds(f"{source}: routes.{name}", route)
        if route.learn is not None and route.learn.feedback.missing == "verifier":
            where = f"{source}: routes.{name}.learn.feedback.missing"
            if not route.capture or route.learn.verifier is None or (
                _asks_an_lm(route.learn.verifier)
            ):  # fmt: skip
                raise ConfigError(f"{where}: set capture, and a verifier that asks no model")
        if route.learn is not None and route.learn.shadow is not None:
            _check_shadow(f"{source}: routes.{name}.learn.shadow", route, route.learn)
        if route.weights and (route.router or len(route.weights) != len(route.upstreams)):
            raise ConfigError(
                f"{source}: routes.{name}.weights: give one for each upstream, and no router"
            )
        for alias in (name, *route.aliases):
            if alias in taken:
                raise ConfigError(
                    f"{source}: {alias!r} names both the route {taken[alias]!r} and {name!r}"
                )
            taken[alias] = name
    for name, key in settings.keys.items():
        for wanted in key.routes:
            if wanted not in settings.routes:
                known = ", ".join(settings.routes) or "none"
                raise ConfigError(
                    f"{source}: keys.{name} names the route {wanted!r}; known are {known}"
                )


def _refuse_group_kinds(where: str, route: RouteSettings) -> None:
    """Refuse verifiers that score a group's replies against each other: here each stands alone."""
    learnt_with = route.learn.verifier if route.learn is not None else None
    for key, verifier in (("verifier", route.verifier), ("learn.verifier", learnt_with)):
        if verifier is not None and verifier.get("kind") in GROUP_KINDS:
            raise ConfigError(
                f"{where}.{key}: {verifier['kind']!r} scores the replies of a group against each "
                "other, and a gateway judges each alone; name another kind"
            )


def _check_shadow(where: str, route: RouteSettings, learn: LearnSettings) -> None:
    """Refuse shadow draws that nobody could judge, or that nothing limits."""
    shadow = learn.shadow
    assert shadow is not None
    if not route.capture:
        raise ConfigError(f"{where}: set capture = true on the route: it draws what was kept")
    if learn.verifier is None or _asks_an_lm(learn.verifier):
        raise ConfigError(f"{where}: set learn.verifier to one that asks no model: it judges")
    if shadow.usd_per_day is None and shadow.calls_per_day is None:
        raise ConfigError(f"{where}: set usd_per_day or calls_per_day")
    if shadow.group_size - 1 > route.max_samples:
        raise ConfigError(f"{where}: group_size is at most max_samples + 1 of the route")


def _asks_an_lm(verifier: Any) -> bool:
    if not isinstance(verifier, Mapping):
        return False
    parts = verifier.get("parts")
    inner = list(parts.values()) if isinstance(parts, Mapping) else []
    return verifier.get("kind") == "judge" or any(map(_asks_an_lm, inner))
