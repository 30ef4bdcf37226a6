"""Orders a route's upstreams for a prompt by a fitted router.

The router's models are named like the upstreams or by their specs. Upstreams that it does not know
come last, in the configured order. What it predicts for the model that answers is kept beside the
request, made before the call: it shortens live tests.

Does not know requests or money. Source: `tfgrpo.routing`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfgrpo.errors import ConfigError
from tfgrpo.routing.router import Router, RouterOptions
from tfgrpo.routing.verbs import load, rule_of
from tfgrpo.serve.settings import RuleSettings

__all__ = ["RouterChooser", "open_chooser"]


class RouterChooser:
    """A router over the upstreams of one route.

    Args:
        router: fitted.
        names: upstream by the router's model name.
    """

    def __init__(self, router: Router, names: Mapping[str, str]) -> None:
        self._router, self._names = router, dict(names)

    def order(self, prompt: str, names: list[str]) -> tuple[list[str], dict[str, float]]:
        """Return the names, best first, and the predicted success of those that are covered."""
        models = [m for m, upstream in self._names.items() if upstream in names]
        if not models:
            return names, {}
        decision = self._router.ask(prompt, among=models)
        ranked = [decision.model, *(c.model for c in decision.ranking)]
        order = list(dict.fromkeys(self._names[m] for m in ranked))
        predictions = {
            self._names[c.model]: min(1.0, max(0.0, c.mean))
            for c in decision.ranking
            if c.coverage == "covered"
        }
        return [*order, *(n for n in names if n not in order)], predictions


def open_chooser(folder: str, rule: RuleSettings, specs: Mapping[str, str]) -> RouterChooser:
    """Read a fitted router for a route.

    Args:
        folder: what `tfgrpo route fit` wrote.
        rule: how it chooses.
        specs: spec by upstream.

    Raises:
        StoreError: the folder cannot be read.
        ConfigError: it knows none of the upstreams, or two rules are set.
    """
    made = rule_of(rule.target, rule.per_usd)
    # The first request must not wait for a sentence encoder: it is ordered by success rates.
    router = load(folder, rule=made, options=RouterOptions(first="rates"))
    names = {
        model: upstream
        for model in router.model_names
        for upstream, spec in specs.items()
        if model in (upstream, spec)
    }
    if not names:
        raise ConfigError(
            f"the router in {folder!r} knows {', '.join(router.model_names)}, none of which is an "
            f"upstream of the route ({', '.join(specs)}): name the upstreams like its models"
        )
    return RouterChooser(router, names)
