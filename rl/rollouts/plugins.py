"""What settings name in words, made: functions, tools, allocators, engines.

Nothing is imported that the settings do not name; modules stand beside the config file or are
installed. Does not know training. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from tfgrpo.errors import ConfigError, boundary
from tfgrpo.policies.tool_loop import offer_text
from tfgrpo.policies.tools import Tool, tool
from tfgrpo.protocols import Allocator, Generator
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel, write_model
from tfgrpo.rl.config import CurriculumConfig, MultiTurnConfig, TrainConfig
from tfgrpo.rl.rollouts.multi_turn import MakeEnvironment
from tfgrpo.rl.rollouts.turn_tools import TurnTools
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.import_string import load_object

ALLOCATORS: Mapping[str, str] = {
    "posterior_gain": "tfgrpo.routing.allocation:PosteriorGain",
    "sgpo": "tfgrpo.routing.allocation_published:Sgpo",
    "vade": "tfgrpo.routing.allocation_published:Vade",
    "xrpo": "tfgrpo.routing.allocation_published:Xrpo",
    "gdro": "tfgrpo.routing.allocation_published:RolloutGdro",
}
"""Short names of allocators; `v0` is `posterior_gain` with a value model's predictions."""


def _callable(name: str, where: str) -> Any:
    """The function, class or tool that `module:name` names."""
    value = load_object(name, where)
    if not callable(value) and not isinstance(value, Tool):
        raise ConfigError(f"{where}: {name!r} is a {type(value).__name__}, not a function")
    return value


def tools_of(multi_turn: MultiTurnConfig) -> dict[str, Tool]:
    """Return the tools that [multi_turn] names, by name.

    Raises:
        ConfigError: one cannot be loaded or has no schema, or two share a name.
    """
    found: dict[str, Tool] = {}
    for name in multi_turn.tools:
        value = _callable(name, "multi_turn.tools")
        made = value if isinstance(value, Tool) else tool(value)
        if made.spec.name in found:
            raise ConfigError(f"multi_turn.tools: two tools are named {made.spec.name!r}")
        found[made.spec.name] = made
    return found


def environment_of(multi_turn: MultiTurnConfig, tools: Mapping[str, Tool]) -> MakeEnvironment:
    """Return what makes the environment of one rollout."""
    if multi_turn.environment:
        make: MakeEnvironment = _callable(multi_turn.environment, "multi_turn.environment")
        return make
    return lambda task: TurnTools(
        tools,
        native=multi_turn.calls == "native",
        timeout_s=multi_turn.tool_timeout_s,
        max_chars=multi_turn.max_observation_chars,
    )


def system_text(config: TrainConfig, tools: Mapping[str, Tool]) -> str:
    """Return the system text, with the tools where they are offered as text."""
    as_text = tools and config.multi_turn.calls == "text"
    offer = offer_text([t.spec for t in tools.values()]) if as_text else ""
    return "\n\n".join(t for t in (config.model.system, offer) if t)


def allocator_of(curriculum: CurriculumConfig) -> Allocator | None:
    """Return what gives group sizes, or None.

    Raises:
        ConfigError: there is no such allocator, or its options are wrong.
    """
    if not curriculum.allocate:
        return None
    options = dict(curriculum.allocate_options)
    if curriculum.allocate == "v0":
        return ValueBudgets(str(options.pop("router", "")), options)
    name = ALLOCATORS.get(curriculum.allocate, curriculum.allocate)
    if ":" not in name:
        raise ConfigError(
            f"curriculum.allocate is {name!r}; allowed are v0, {', '.join(ALLOCATORS)} or "
            "'module:name'"
        )
    with boundary(ConfigError, f"curriculum.allocate {curriculum.allocate!r}"):
        made: Allocator = _callable(name, "curriculum.allocate")(**options)
    return made


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


def engine_of(config: TrainConfig, parts: LoadedModel) -> Generator | None:
    """Return another maker of tokens, or None for the trainer's own.

    Raises:
        ConfigError: the server's folder is not set or is the model's own.
        MissingExtraError: vLLM is not installed.
    """
    e = config.engine
    if e.kind == "own":
        return None
    from tfgrpo.rl.generation.vllm_inprocess import VllmColocated
    from tfgrpo.rl.generation.vllm_server import FolderReload, VllmServer, serving_folder

    is_server = e.kind == "vllm-server"
    folder = serving_folder(
        e.folder, config.model.lm, lambda path: write_model(path, parts), must_run=is_server
    )
    if not is_server:
        return VllmColocated(str(folder), **e.options)
    return VllmServer(
        e.base_url,
        e.model or e.folder,
        reload=FolderReload(folder, e.base_url, timeout_s=e.timeout_s, api_key_env=e.api_key_env),
        timeout_s=e.timeout_s,
        concurrency=e.concurrency,
        context_tokens=parts.decoder.shape.context,
        api_key_env=e.api_key_env,
    )
