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
from tfgrpo.config.sections import Section, explain, load_toml
from tfgrpo.errors import ConfigError

__all__ = ["SearchConfig", "read_config"]


class ModelSection(Section):
    """Which model proposes, and how it is asked."""

    lm: str = "local:smollm2-135m"
    options: dict[str, Any] = {}
    form: Literal["native", "text"] = "native"
    """Tool calls of the provider, or tools described in the prompt."""
    system: str = ""
    describe_tools: bool = True
    """With form `text`: put the tools' schemas into the prompt."""
    show_siblings: bool = False
    sampling: SamplingConfig = SamplingConfig(temperature=0.8, max_tokens=256)
    prices: dict[str, dict[str, float]] = {}
    """Prices by model id in dollars per million tokens: input, output, cache_read, cache_write.
    A cap on money needs the model's."""
    examples: tuple[tuple[tuple[Literal["user", "assistant"], str], ...], ...] = ()
    """Worked examples as turns, for models that learn by example only."""


class SearchSection(Section):
    """How the tree is grown."""

    algorithm: str = "astar"
    algorithm_options: dict[str, Any] = {}
    scorer: Literal["robust", "paper", "frequency", "likelihood", "unit", "judge"] = "robust"
    imagination: bool = False
    """Let the model imagine the rest of the plan for the `robust` and `paper` scorers."""
    samples: int = 8
    mode: Literal["deterministic", "fast"] = "deterministic"
    concurrency: int = 8
    lookahead: int = 0
    execution: Literal["lazy", "eager"] = "lazy"
    merge: Literal["off", "sound", "any"] = "off"
    verify: Literal["after", "during"] = "after"
    verifier_timeout_s: float = 120.0
    """Wall time of one verification, seconds."""
    patience: int | None = None
    seed: int = 0


class WorldSection(Section):
    """Where actions happen: a Python factory or an MCP server; neither is reasoning in text."""

    python: str = ""
    """`file.py:function` or `module:function`, called with the task; returns an environment."""
    mcp: str | tuple[str, ...] = ()
    """A server's URL, or its command as a list."""
    is_simulator: bool = False
    effects: dict[str, Literal["pure", "read", "idempotent", "reversible", "irreversible"]] = {}
    timeout_s: float = 30.0


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
    calls: float | None = None
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    tool_calls: float | None = None
    expansions: float | None = 64
    nodes: float | None = None
    depth: float | None = None
    seconds: float | None = None


class SearchConfig(Section):
    """Everything `tfgrpo search` reads."""

    tasks: Path
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
        raise ConfigError(explain(exc, SearchConfig, str(path))) from None
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
