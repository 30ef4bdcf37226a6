"""Allocators by name: what `[curriculum]` of a training and `[learn]` of a learning run may say.

Does not know who asks, or how an allocator decides. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfgrpo.errors import ConfigError, boundary
from tfgrpo.protocols import Allocator, GrowingAllocator
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.routing.budgets.posterior_gain import (
    PosteriorGain,
    PredictionError,
    Uniform,
    state_predictor,
)
from tfgrpo.routing.budgets.practice import Practice
from tfgrpo.routing.budgets.published import Dars, PromptGdro, RolloutGdro, Sgpo, Vade, Xrpo
from tfgrpo.routing.budgets.top_up import DarsTopUp, GainTopUp, XrpoTopUp
from tfgrpo.routing.estimator.value_model import ModelState, ValueModel
from tfgrpo.routing.records import outcomes_of_groups
from tfgrpo.runtime.import_string import load_object

__all__ = ["ALLOCATORS", "Predicted", "open_allocator"]

ALLOCATORS: Mapping[str, Callable[..., Allocator]] = {
    "uniform": Uniform,
    "posterior_gain": PosteriorGain,
    "sgpo": Sgpo,
    "vade": Vade,
    "xrpo": Xrpo,
    "dars": Dars,
    "gdro": RolloutGdro,
    "prompt_gdro": PromptGdro,
    "top_up_dars": DarsTopUp,
    "top_up_xrpo": XrpoTopUp,
}
_NAMES = ("practice", "v0", "top_up", *ALLOCATORS)
_RULE_OPTIONS = ("success_at", "decay", "max_seen")


def open_allocator(
    name: str, options: Mapping[str, Any], *, group_size: int, where: str = "allocate"
) -> Allocator | None:
    """Return the allocator of a name; None for the empty one.

    Args:
        name: `practice` or `top_up` (with `router` among the options, by a router's predictions
            too), `v0`
            (`posterior_gain` by a router's predictions), another of `ALLOCATORS`, or `module:name`
            of a class whose objects are allocators.
        options: its arguments.
        group_size: what `practice` finishes a group to, unless `size` says another.
        where: the settings key, for messages.

    Raises:
        ConfigError: there is no such allocator, or its options are wrong.
    """
    if not name:
        return None
    given = dict(options)
    with boundary(ConfigError, f"{where} {name!r}"):
        if name == "practice":
            probe = min(3, given.get("size", group_size))
            return _by_posterior(Practice, {"size": group_size, "probe": probe, **given})
        if name == "top_up":
            return _by_posterior(GainTopUp, given)
        if name == "v0":
            return _posterior_gain(given, where)
        if name in ALLOCATORS:
            return ALLOCATORS[name](**given)
        if ":" not in name:
            raise ConfigError(
                f"{where} is {name!r}; allowed are {', '.join(_NAMES)} or 'module:name'"
            )
        made: Allocator = load_object(name, where)(**given)
        return made


def _by_posterior(kind: type[Practice] | type[GainTopUp], options: dict[str, Any]) -> Allocator:
    """Return a rule that goes by a posterior of success rates, with a router's word or without."""
    router = str(options.pop("router", ""))
    of_rule = {k: options.pop(k) for k in _RULE_OPTIONS if k in options}
    rule = {"max_seen": 8.0, **of_rule}
    plain = kind(**options, rule=PosteriorGain(**rule))
    if not router:
        return plain

    def make(state: ModelState) -> Allocator:
        error = PredictionError.of_state(state)
        return kind(
            **options, rule=PosteriorGain(**rule, error=error),
            predict=state_predictor(state.predict),
        )  # fmt: skip

    return Predicted(router, make, of_rule.get("success_at"))


def _posterior_gain(options: dict[str, Any], where: str) -> Allocator:
    router = str(options.pop("router", ""))
    if not router:
        raise ConfigError(
            f"{where} 'v0' needs the option router, the folder that `tfgrpo route fit` wrote; "
            "without one use 'posterior_gain' or 'practice'"
        )
    PosteriorGain(**options)

    def make(state: ModelState) -> PosteriorGain:
        error = PredictionError.of_state(state)
        return PosteriorGain(
            predict=state_predictor(state.predict), error=error, **options
        )  # fmt: skip

    return Predicted(router, make, options.get("success_at"))


class Predicted:
    """A rule of budgets by a router's value model, which is told this run's outcomes.

    Args:
        router: folder of a router that `tfgrpo route fit` wrote.
        make: the rule, from the state of the policy that practises.
        success_at: reward from which a rollout counts as a success.
    """

    def __init__(
        self,
        router: str,
        make: Callable[[ModelState], Allocator],
        success_at: float | None = None,
    ) -> None:
        from tfgrpo.routing.router_files import RouterFiles

        self._value: ValueModel = RouterFiles.load(router).value
        self._make, self._success_at = make, success_at
        self._last: tuple[tuple[str, ...], ModelState] | None = None

    def _state(self, history: Sequence[RolloutGroup]) -> ModelState:
        seen = tuple(group.group_id for group in history)
        if self._last is None or self._last[0] != seen:  # asked several times a step
            mine = "the policy"
            outcomes = outcomes_of_groups(
                history, success_at=self._success_at, model_of=lambda group: mine
            )
            self._last = (seen, self._value.state(outcomes, model=mine))
        return self._last[1]

    def _rule(self, history: Sequence[RolloutGroup]) -> Allocator:
        return self._make(self._state(history))

    def predictions(self, tasks: Sequence[Task], history: Sequence[RolloutGroup]) -> list[float]:
        """Return the success rate that the value model expects of each task."""
        predict = state_predictor(self._state(history).predict)
        return [float(p) for p in predict(tasks).mean] if tasks else []

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return the number of rollouts of each task."""
        return self._rule(history)(tasks, history, budget)

    def grow(
        self,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        groups: Sequence[RolloutGroup],
        sizes: Sequence[int],
        budget: int,
    ) -> list[int]:
        """Return the sizes after a step's first rollouts; those of a rule that does not grow."""
        rule = self._rule(history)
        if not isinstance(rule, GrowingAllocator):
            return list(sizes)
        return rule.grow(tasks, history, groups, sizes, budget)
