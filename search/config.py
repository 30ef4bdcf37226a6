"""The settings of `tfgrpo search`: one frozen model, read from TOML.

Paths are relative to the file they stand in. An unknown key is an error that names the nearest
known one. Does not know how a setting is used (`command.py`). Needs `pydantic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from tfgrpo.config.learn import SamplingConfig
from tfgrpo.config.sections import Section, explain, load_toml, wrong_verb
from tfgrpo.errors import ConfigError

__all__ = ["SearchConfig", "read_config"]


class ModelSection(Section):
    """Which model proposes, and how it is asked."""

    lm: str = "local:smollm2-135m"
    """Spec of the model that proposes actions."""
    options: dict[str, Any] = {}
    """Options of its backend, such as `api_key_env`."""
    form: Literal["native", "text"] = "native"
    """Tool calls of the provider, or tools described in the prompt."""
    system: str = ""
    """System text of its prompts."""
    describe_tools: bool = True
    """With form `text`: put the tools' schemas into the prompt."""
    show_siblings: bool = False
    """Show the actions proposed so far beside a node, so that further ones differ."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.8, max_tokens=256)
    """How it draws."""
    prices: dict[str, dict[str, float]] = {}
    """Prices by model id in dollars per million tokens: input, output, cache_read, cache_write.
    A cap on money needs the model's."""
    examples: tuple[tuple[tuple[Literal["user", "assistant"], str], ...], ...] = ()
    """Worked examples as turns, for models that learn by example only."""


class SearchSection(Section):
    """How the tree is grown."""

    algorithm: str = "astar"
    """Which node comes next, such as `astar`, `beam`, `mcts`, `best_of_n` (docs/search.md)."""
    algorithm_options: dict[str, Any] = {}
    """Options of the algorithm."""
    scorer: Literal["robust", "paper", "frequency", "likelihood", "unit", "judge"] = "robust"
    """What an action costs, from the ways the published methods score it."""
    scorer_options: dict[str, Any] = {}
    """Knobs of the `robust` and `paper` scorers, such as `alpha` and `beta` (docs/search.md)."""
    imagination: bool = False
    """Let the model imagine the rest of the plan for the `robust` and `paper` scorers."""
    samples: int = 8
    """Actions drawn for a node where the algorithm does not say."""
    mode: Literal["deterministic", "fast"] = "deterministic"
    """`deterministic` gives equal trees for equal seeds; `fast` takes results as they come."""
    concurrency: int = 8
    """Visits whose work may run at the same time."""
    lookahead: int = 0
    """Visits open at once in deterministic mode; 0 takes the algorithm's own."""
    execution: Literal["lazy", "eager"] = "lazy"
    """`lazy` runs an action when its node is chosen, `eager` when it is proposed."""
    merge: Literal["off", "sound", "any"] = "off"
    """Whether nodes of equal state become one; needs `execution = "eager"`."""
    verify: Literal["after", "during"] = "after"
    """Judge finished plans at the end, or let the verifier steer: right for training data, never
    for a benchmark."""
    verifier_timeout_s: float = 120.0
    """Wall time of one verification, seconds."""
    patience: int | None = None
    """Expansions without a better best node before the search ends; unset does not end it."""
    seed: int = 0
    """Seeds every draw."""


class WorldSection(Section):
    """Where actions happen: a Python factory or an MCP server; neither is reasoning in text."""

    python: str = ""
    """`file.py:function` or `module:function`, called with the task; returns an environment."""
    mcp: str | tuple[str, ...] = ()
    """A server's URL, or its command as a list."""
    is_simulator: bool = False
    """True where actions have no effect outside, so that everything may be tried."""
    effects: dict[str, Literal["pure", "read", "idempotent", "reversible", "irreversible"]] = {}
    """Effect of each tool by name, over what the server says of it."""
    timeout_s: float = 30.0
    """Wall time of one action."""


class OutputSection(Section):
    """What is kept."""

    groups: Path | None = None
    """JSONL or Parquet of the groups found."""
    logs: Path | None = None
    """Folder of event logs, one a task; a search continues from its log."""
    views: Path | None = None
    """Folder of HTML views, one a task."""
    memory: Path | None = None
    """Plan memory: read where it exists, written at the end."""
    run: Path | None = None
    """Run folder that keeps calls, so that none is paid twice."""


class BudgetSection(Section):
    """Limits of each task's search; see `tfgrpo.store.budget.Budget`."""

    cost_usd: float | None = None
    """Money in US dollars."""
    calls: float | None = None
    """Requests to models."""
    prompt_tokens: float | None = None
    """Tokens sent."""
    completion_tokens: float | None = None
    """Tokens received."""
    tool_calls: float | None = None
    """Actions carried out."""
    expansions: float | None = 64
    """Nodes expanded."""
    nodes: float | None = None
    """Nodes held."""
    depth: float | None = None
    """Deepest node."""
    seconds: float | None = None
    """Wall time."""


class SearchConfig(Section):
    """Everything `tfgrpo search` reads."""

    tasks: Path
    """File of tasks; paths are relative to the config."""
    verifier: str | dict[str, Any] = ""
    """As for `tfgrpo.verifiers.make_verifier`; empty takes the world's own goal test."""
    model: ModelSection = ModelSection()
    search: SearchSection = SearchSection()
    world: WorldSection = WorldSection()
    budget: BudgetSection = BudgetSection()
    output: OutputSection = OutputSection()


def read_config(path: Path | str) -> SearchConfig:
    """Return the settings of a TOML file.

    Raises:
        ConfigError: no file, no TOML, an unknown key or a wrong value; the message names each.
    """
    path = Path(path)
    values = load_toml(path)
    try:
        config = SearchConfig.model_validate(_with_folder(values, path.parent))
    except ValidationError as exc:
        told = wrong_verb(values, "search", str(path)) + explain(exc, SearchConfig, str(path))
        raise ConfigError(told) from None
    if config.world.python and config.world.mcp:
        raise ConfigError(f"{path}: [world] has both python and mcp: give one of them")
    return config


def _with_folder(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make the paths relative to the file."""
    found = dict(values)
    if isinstance(found.get("tasks"), str):
        found["tasks"] = folder / found["tasks"]
    output = found.get("output")
    if isinstance(output, dict):
        found["output"] = {k: folder / v if isinstance(v, str) else v for k, v in output.items()}
    world = found.get("world")
    if isinstance(world, dict) and ".py:" in str(world.get("python", "")):
        found["world"] = {**world, "python": str(folder / world["python"])}
    return found
