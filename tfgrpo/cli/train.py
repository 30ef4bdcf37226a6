"""`tfgrpo train CONFIG.toml`: train, resume, evaluate, export.

Wires what training may not know: rollout budgets of `tfgrpo.routing`. Does not know how training
works; prints one line per step and one verdict. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tfgrpo.errors import ConfigError, MissingExtraError, boundary
from tfgrpo.protocols import Allocator, TopUp
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.import_string import add_module_folder, load_object

if TYPE_CHECKING:
    from tfgrpo.rl import TrainResult
    from tfgrpo.rl.config_sections import CurriculumConfig

ALLOCATORS: Mapping[str, str] = {
    "posterior_gain": "tfgrpo.routing.allocation:PosteriorGain",
    "sgpo": "tfgrpo.routing.allocation_published:Sgpo",
    "vade": "tfgrpo.routing.allocation_published:Vade",
    "xrpo": "tfgrpo.routing.allocation_published:Xrpo",
    "gdro": "tfgrpo.routing.allocation_published:RolloutGdro",
    "prompt_gdro": "tfgrpo.routing.allocation_published:PromptGdro",
}
"""Short names of allocators; `v0` is `posterior_gain` with a value model's predictions."""
TOP_UPS: Mapping[str, str] = {
    "gain": "tfgrpo.routing.top_up:GainTopUp",
    "practice": "tfgrpo.routing.top_up:ProbeTopUp",
    "dars": "tfgrpo.routing.top_up:DarsTopUp",
    "xrpo": "tfgrpo.routing.top_up:XrpoTopUp",
}
"""Short names of top-up rules; `v0` is `gain` with a value model's predictions."""


def train(
    config: Annotated[Path, typer.Argument(help="Settings as TOML; see docs/rl.md.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, over the file.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line per step.")] = False,
) -> None:
    """Train a model on groups of rollouts; the same command goes on after a stop.

    Under `torchrun` every process trains a share and the first one prints and writes.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as exc:
        raise MissingExtraError.of("rl", "training", exc.name or "torch") from exc
    from tfgrpo import rl
    from tfgrpo.rl import distributed

    add_module_folder(config.parent)
    settings = rl.TrainConfig.from_toml(config, overrides or [])
    rank, processes = distributed.start()
    try:
        result = rl.train(
            settings,
            allocate=allocator_of(settings.curriculum, settings.rollout.group_size),
            top_up=top_up_of(settings.curriculum),
            on_step=None if quiet or rank else _print_step,
        )
    finally:
        distributed.finish()
    if rank == 0:
        typer.echo(_verdict(result))
    if processes > 1:
        distributed.end()


def allocator_of(curriculum: CurriculumConfig, group_size: int = 8) -> Allocator | None:
    """Return what gives group sizes, or None.

    Raises:
        ConfigError: there is no such allocator, or its options are wrong.
    """
    if not curriculum.allocate:
        return None
    options = dict(curriculum.allocate_options)
    if curriculum.allocate in ("vade", "prompt_gdro"):
        options.setdefault("group_size", group_size)
    if curriculum.allocate == "dars":
        raise ConfigError(
            "curriculum.allocate 'dars' would give hard tasks a larger share before they are seen, "
            "from the rates of earlier steps alone, and starve the others: set curriculum.top_up = "
            "'dars', which adds to groups of the same step"
        )
    if curriculum.allocate == "v0":
        return ValueBudgets(str(options.pop("router", "")), options)
    name = ALLOCATORS.get(curriculum.allocate, curriculum.allocate)
    if ":" not in name:
        raise ConfigError(
            f"curriculum.allocate is {name!r}; allowed are v0, {', '.join(ALLOCATORS)} or "
            "'module:name'"
        )
    with boundary(ConfigError, f"curriculum.allocate {curriculum.allocate!r}"):
        made: Allocator = load_object(name, "curriculum.allocate")(**options)
    return made


def top_up_of(curriculum: CurriculumConfig) -> TopUp | None:
    """Return what adds rollouts to a step's groups, or None.

    Raises:
        ConfigError: there is no such rule, or its options are wrong.
    """
    if not curriculum.top_up:
        return None
    options = dict(curriculum.top_up_options)
    if curriculum.top_up == "v0":
        return ValueTopUp(str(options.pop("router", "")), options)
    name = TOP_UPS.get(curriculum.top_up, curriculum.top_up)
    if ":" not in name:
        raise ConfigError(
            f"curriculum.top_up is {name!r}; allowed are v0, {', '.join(TOP_UPS)} or 'module:name'"
        )
    with boundary(ConfigError, f"curriculum.top_up {curriculum.top_up!r}"):
        made: TopUp = load_object(name, "curriculum.top_up")(**options)
    return made


class ValueTopUp:
    """`gain` with a fitted router's value model, told this run's outcomes.

    Args:
        router: folder of a router that `tfgrpo route fit` wrote.
        options: of `GainTopUp`.
    """

    def __init__(self, router: str, options: Mapping[str, Any]) -> None:
        if not router:
            raise ConfigError(
                "curriculum.top_up 'v0' needs top_up_options.router, the folder that `tfgrpo route "
                "fit` wrote; without one use 'gain'"
            )
        self._rule = import_module("tfgrpo.routing.top_up").GainTopUp
        self._allocation = import_module("tfgrpo.routing.allocation")
        self._records = import_module("tfgrpo.routing.records")
        self._value = import_module("tfgrpo.routing.router_files").RouterFiles.load(router).value
        self._options = dict(options)
        with boundary(ConfigError, "curriculum.top_up_options"):
            self._rule(**self._options)

    def first(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return the number of first rollouts of each task."""
        counts: list[int] = self._rule(**self._options).first(tasks, history, budget)
        return counts

    def more(
        self,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        rewards: Sequence[Sequence[float]],
        left: int,
    ) -> list[int]:
        """Return the number of further rollouts of each group."""
        counts: list[int] = self._now(history).more(tasks, history, rewards, left)
        return counts

    def predictions(self, tasks: Sequence[Task], history: Sequence[RolloutGroup]) -> list[float]:
        """Return the expected success rate of each task."""
        found: list[float] = self._now(history).predictions(tasks, history)
        return found

    def _now(self, history: Sequence[RolloutGroup]) -> Any:
        """The rule with the value model as it stands after the history."""
        outcomes = self._records.outcomes_of_groups(
            history,
            success_at=self._options.get("success_at", 0.5),
            model_of=lambda group: "the trained model",
        )
        state = self._value.state(outcomes, model="the trained model")
        error = self._allocation.PredictionError.of_state(state)
        return self._rule(
            predict=self._allocation.state_predictor(state.predict),
            rule=self._allocation.PosteriorGain(max_seen=8.0, error=error),
            **self._options,
        )


class ValueBudgets:
    """V_0 budgets: a fitted router's value model, told this run's outcomes, predicts each task's
    success, and rollouts go where a mixed group becomes likelier.

    Args:
        router: folder of a router that `tfgrpo route fit` wrote.
        options: of `PosteriorGain`.
    """

    def __init__(self, router: str, options: Mapping[str, Any]) -> None:
        if not router:
            raise ConfigError(
                "curriculum.allocate 'v0' needs allocate_options.router, the folder that `tfgrpo "
                "route fit` wrote; without one use 'posterior_gain'"
            )
        self._rules = import_module("tfgrpo.routing.allocation")
        self._records = import_module("tfgrpo.routing.records")
        self._value = import_module("tfgrpo.routing.router_files").RouterFiles.load(router).value
        self._options = dict(options)
        with boundary(ConfigError, "curriculum.allocate_options"):
            self._rules.PosteriorGain(**self._options)

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return the number of rollouts of each task."""
        outcomes = self._records.outcomes_of_groups(
            history,
            success_at=self._options.get("success_at"),
            model_of=lambda group: "the trained model",
        )
        state = self._value.state(outcomes, model="the trained model")
        rule = self._rules.PosteriorGain(
            predict=self._rules.state_predictor(state.predict),
            error=self._rules.PredictionError.of_state(state),
            **self._options,
        )
        counts: list[int] = rule(tasks, history, budget)
        return counts


def _print_step(report: Any) -> None:
    figures = report.figures
    typer.echo(
        f"step {report.step}: reward {figures['reward_mean']:.3f}, informative groups "
        f"{figures['informative_share']:.0%}, gradient norm {figures['grad_norm']:.3g}, "
        f"{figures['seconds']:.2f} s ({figures['rollout_seconds']:.2f} rollout), "
        f"{figures['samples_per_s']:.1f} rollouts/s"
    )


def _verdict(result: TrainResult) -> str:
    where = f"the model is in {result.model} (load it as local:{result.model})"
    found = result.evaluation
    if not found:
        return f"done; no held-out tasks were given, so nothing was evaluated; {where}"
    return (
        f"done; held-out mean reward {found['mean']:.3f} (95 % interval {found['low']:.3f} to "
        f"{found['high']:.3f}, {found['tasks']} tasks, no hints); {where}"
    )
