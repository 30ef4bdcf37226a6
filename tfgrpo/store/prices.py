"""What a model costs: the config's prices, the package's table, litellm's where it is installed.

An unknown price is None and never 0; models that run on the user's own machine cost 0. Prices are
list prices of the base tier: batch discounts and surcharges for long contexts are not applied.
litellm's table is read as a JSON file, without importing litellm.

Does not know calls or budgets. Source: `prices.json` names the date and origin of its figures.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Usage

__all__ = ["FREE", "Price", "PriceTable", "price_help", "price_of"]

_OWN_MACHINE = ("local:", "scripted:", "vllm:")
_SNAPSHOT = re.compile(r"-(?:\d{4}-\d{2}-\d{2}|\d{8})$")
_FIELDS = ("input", "output", "cache_read", "cache_write", "max_output_tokens")
_LITELLM_FILES = (
    "model_prices_and_context_window_backup.json",
    "model_prices_and_context_window.json",
)


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per million tokens of each class.

    >>> price = Price(input=1.25, output=10, cache_read=0.625)
    >>> usage = Usage(uncached_tokens=5_005, cache_read_tokens=257_955, text_tokens=1_744)
    >>> round(price.cost_usd(usage), 6)
    0.184918
    """

    input: float
    output: float
    cache_read: float | None = None
    """None bills cached tokens like others: an upper bound."""
    cache_write: float | None = None
    """None bills written tokens like others."""
    max_output_tokens: int | None = None
    """Longest reply that the model gives, for worst cases."""

    def cost_usd(self, usage: Usage) -> float:
        """Return the cost of disjoint token classes in dollars."""
        read = self.input if self.cache_read is None else self.cache_read
        write = self.input if self.cache_write is None else self.cache_write
        millionths = (
            usage.uncached_tokens * self.input
            + usage.cache_read_tokens * read
            + usage.cache_write_tokens * write
            + usage.completion_tokens * self.output
        )
        return millionths / 1e6

    def worst_usd(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the most that so many tokens can cost, whatever the provider's cache does."""
        dearest = max(self.input, self.cache_write or 0.0)
        return (prompt_tokens * dearest + completion_tokens * self.output) / 1e6

    @classmethod
    def from_dict(cls, row: Mapping[str, Any], where: str) -> Self:
        """Check and restore a price.

        Raises:
            ConfigError: `input` or `output` is missing, a field is unknown, a value no price.
        """
        unknown = sorted(row.keys() - set(_FIELDS))
        if unknown or "input" not in row or "output" not in row:
            raise ConfigError(
                f"{where}: a price has input and output, and may have {', '.join(_FIELDS[2:])}; "
                f"got {', '.join(sorted(row)) or 'nothing'}"
            )
        for name, value in row.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ConfigError(
                    f"{where}: {name}={value!r} is no price in dollars per million tokens"
                )
        return cls(**row)


FREE = Price(0.0, 0.0, 0.0, 0.0)
"""What a model on the user's own machine costs."""


class PriceTable:
    """Finds prices by model id.

    Args:
        own: prices by model id (`openai:gpt-5`) or bare model name (`gpt-5`), as in a config file.
        use_litellm: look into litellm's table, where litellm is installed, for what is not found.
    """

    def __init__(
        self, own: Mapping[str, Mapping[str, Any]] | None = None, *, use_litellm: bool = True
    ) -> None:
        rows = own or {}
        self._own = {name: Price.from_dict(row, f"price of {name!r}") for name, row in rows.items()}
        self._use_litellm = use_litellm

    def find(self, model_id: str) -> Price | None:
        """Return the price of a model given as a spec string, or None where it is unknown.

        A spec matches with or without its options (`?api_key_env=…`), on either side. A model
        behind a URL of the user's has a price only where the config gives one: the name alone does
        not say who bills.
        """
        bare = bare_name(model_id)
        for name in (model_id, without_query(model_id), bare):
            if name in self._own:
                return self._own[name]
        for name, own in self._own.items():
            if without_query(name) == without_query(model_id):
                return own
        model_id = without_query(model_id)
        if model_id.startswith(_OWN_MACHINE):
            return FREE
        if not model_id.startswith(("openai:", "litellm:")):
            return None
        full = f"openai/{bare}" if model_id.startswith("openai:") else bare
        for name in dict.fromkeys((full, _SNAPSHOT.sub("", full))):
            if name in _package_table():
                return _package_table()[name]
            if self._use_litellm and (price := _litellm_price(name)) is not None:
                return price
        return None


def price_of(lm: Any) -> Price | None:
    """Return an LM's price: what it says itself (a wrapper that prices its replies), else what the
    table knows of its model; None where it is unknown."""
    own = getattr(lm, "price", None)
    if isinstance(own, Price):
        return own
    return PriceTable().find(str(getattr(lm, "model_id", "")))


def price_help(model_id: str) -> str:
    """Return how to give a model's price, as TOML that can be copied.

    >>> print(price_help("http://h/v1?api_key_env=K#m"))
    set run.prices in the config, as TOML:
    [run.prices."http://h/v1#m"]
    input = 1.25   # dollars per million tokens
    output = 10.0
    """
    name = json.dumps(without_query(model_id), ensure_ascii=False)
    return (
        f"set run.prices in the config, as TOML:\n[run.prices.{name}]\n"
        "input = 1.25   # dollars per million tokens\noutput = 10.0"
    )


def without_query(model_id: str) -> str:
    """Return a spec without its options, whether they stand in the URL or at the end.

    >>> without_query("http://h/v1?api_key_env=K#m"), without_query("openai:gpt-5?stream=false")
    ('http://h/v1#m', 'openai:gpt-5')
    """
    head, mark, model = model_id.partition("#")
    return head.partition("?")[0].rstrip("/") + mark + model.partition("?")[0]


def bare_name(model_id: str) -> str:
    """Return the model's name without backend and address.

    >>> bare_name("http://127.0.0.1:8000/v1#qwen"), bare_name("litellm:xai/grok-4")
    ('qwen', 'xai/grok-4')
    """
    model_id = without_query(model_id)
    if "#" in model_id:
        return model_id.rsplit("#", 1)[1]
    return model_id.partition(":")[2] or model_id


@cache
def _package_table() -> dict[str, Price]:
    text = files("tfgrpo.store").joinpath("prices.json").read_text(encoding="utf-8")
    rows = json.loads(text)["models"]
    return {name: Price.from_dict(row, f"prices.json, {name!r}") for name, row in rows.items()}


@cache
def _litellm_rows() -> dict[str, Any]:
    found = importlib.util.find_spec("litellm")
    for folder in (found.submodule_search_locations or []) if found else []:
        for file in _LITELLM_FILES:
            path = Path(folder) / file
            if path.is_file():
                rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                return rows
    return {}


def _litellm_price(name: str) -> Price | None:
    rows = _litellm_rows()
    provider, _, bare = name.partition("/")
    row = rows.get(name)
    if row is None and (rows.get(bare) or {}).get("litellm_provider") == provider:
        row = rows[bare]
    if not isinstance(row, dict):
        return None
    given, taken = row.get("input_cost_per_token"), row.get("output_cost_per_token")
    if not isinstance(given, (int, float)) or not isinstance(taken, (int, float)):
        return None
    if not given and not taken:
        return None  # the table writes 0 where it does not know
    read, write = row.get("cache_read_input_token_cost"), row.get("cache_creation_input_token_cost")
    most = row.get("max_output_tokens")
    return Price(
        given * 1e6,
        taken * 1e6,
        read * 1e6 if isinstance(read, (int, float)) and read else None,
        write * 1e6 if isinstance(write, (int, float)) and write else None,
        most if isinstance(most, int) else None,
    )
