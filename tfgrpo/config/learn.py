"""The settings of a learning run: one frozen model, TOML only, every mistake named.

Order: command line over file over defaults; the environment holds keys only. An unknown key is an
error that suggests the nearest known one. Paths are relative to the file they stand in.

Does not know: how a setting is used. Idea: httpx-like exact objects, readable errors (own).
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tfgrpo.config.nudge import NudgeConfig
from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message, Role
from tfgrpo.protocols import Limits, Sampling
from tfgrpo.rollout import Task


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingConfig(_Section):
    """How one role draws tokens."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    reasoning_effort: str | None = None
    extra: dict[str, Any] = {}

    def to_sampling(self) -> Sampling:
        """Return the sampling record that requests carry."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            stop=self.stop,
            logprobs=self.logprobs,
            reasoning_effort=self.reasoning_effort,
            extra=self.extra,
        )


class RoleConfig(_Section):
    """The LM of one role."""

    lm: str = "local:smollm2-135m"
    """Spec string: `openai:MODEL`, `http://HOST/v1#MODEL`, `litellm:…`, `vllm:…`, `local:…`."""
    options: dict[str, Any] = {}
    """Backend options, such as `api_key_env` or `supports_n`."""
    sampling: SamplingConfig = SamplingConfig()
    timeout_s: float = Field(default=120.0, gt=0)
    """Wall time of one call."""
    first_token_s: float | None = Field(default=None, gt=0)
    context_tokens: int | None = Field(default=None, ge=256)
    """The model's window, where the backend cannot tell."""

    def to_limits(self) -> Limits:
        """Return the limits that requests carry."""
        return Limits(timeout_s=self.timeout_s, first_token_s=self.first_token_s)


class PolicyConfig(RoleConfig):
    """What acts."""

    kind: Literal["chat", "tools", "function"] = "chat"
    system: str = ""
    """The system text of the bare prompt."""
    tools: tuple[str, ...] = ()
    """Python functions as `module:name`, for kind `tools`."""
    function: str = ""
    """A sync or async function as `module:name`, for kind `function`."""
    max_steps: int = Field(default=10, ge=1)


class CriticConfig(RoleConfig):
    """What contrasts good and bad attempts; empty `lm` means the policy's."""

    lm: str = ""


class TasksConfig(_Section):
    """Where tasks come from and how they are split."""

    path: str = ""
    """JSONL with `task_id`, `prompt`, optional `reference` and `metadata`."""
    traces: str = ""
    """JSONL of groups to learn from in place of fresh practice rollouts."""
    practice: int | None = Field(default=None, ge=1)
    gate: int | None = Field(default=None, ge=0)
    test: int | None = Field(default=None, ge=0)
    """Sizes of the splits; None shares what is left equally."""
    stratify: str = ""
    """Metadata key whose values are spread evenly over the splits."""
    seed: int = 0


class LearnConfig(_Section):
    """The loop."""

    preset: Literal["default", "paper-main", "paper-preview"] = "default"
    epochs: int = Field(default=1, ge=1)
    batch: int = Field(default=16, ge=1)
    """Practice tasks a step."""
    group_size: int = Field(default=8, ge=1)
    seed: int = 0
    entries: Literal["lessons", "exemplars", "both"] = "both"
    """What a step may propose."""
    reference_exemplars: bool = False
    """Allow a task's reference as an exemplar where every rollout failed."""
    objective_agent: str = ""
    """What goes in and comes out, in words, for the critic."""
    objective_learning: str = ""
    """What kind of lesson is wanted, for the critic."""
    settings: dict[str, Any] = {}
    """Further experience settings by name (caps, experiences a query, cutting, placement)."""
    ground_truth: bool = True
    """False hides rewards and answers from the critic."""
    keep_share: float = Field(default=0.8, gt=0, le=1)
    """Share of the entries that a practice task is shown, chosen by chance, so that each entry's
    effect can be told; 1 shows all. The paper presets show all."""
    top_k: int = Field(default=0, ge=0)
    """Also try giving each task only its k nearest entries; 0 does not. The gate decides."""
    embedder: str = "hashed"
    """`hashed` n-grams, or the name of a sentence-transformers model."""


class GateConfig(_Section):
    """The gate and the final proof."""

    enabled: bool = True
    group_size: int = Field(default=4, ge=1)
    """Draws a gate task for each arm."""
    min_difference: float = 0.0
    """The paired mean difference must be at least this."""
    max_harm: float = 0.01
    """The one-sided lower bound must be above minus this."""
    level: float = Field(default=0.90, gt=0.5, lt=1)
    """One-sided level of that bound over the whole run: it is shared out over the looks."""
    retry_single_edits: int = Field(default=2, ge=0)
    """How many rejected edits are tried again alone."""
    test_group_size: int = Field(default=4, ge=1)
    """Draws a test task for each arm."""


class BudgetConfig(_Section):
    """The hard cap on all spend, failed calls and retries included."""

    cost_usd: float | None = Field(default=None, gt=0)
    calls: int | None = Field(default=None, ge=1)
    prompt_tokens: int | None = Field(default=None, ge=1)
    completion_tokens: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, gt=0)


class RunConfig(_Section):
    """Where the run lives and how it is driven."""

    folder: str = Field(default="runs/learn", min_length=1)
    concurrency: int = Field(default=32, ge=1)
    timeout_s: float = Field(default=600.0, gt=0)
    """Wall time of one rollout."""
    on_truncated: Literal["exclude", "grade"] = "exclude"
    probe: int = Field(default=4, ge=0)
    cache: bool = True
    retry_deadline_s: float = Field(default=300.0, gt=0)
    prices: dict[str, dict[str, float]] = {}
    """Prices by model id in dollars per million tokens: input, output, cache_read, cache_write."""


class Config(_Section):
    """Everything that a learning run can be told."""

    run: RunConfig = RunConfig()
    tasks: TasksConfig = TasksConfig()
    policy: PolicyConfig = PolicyConfig()
    critic: CriticConfig = CriticConfig()
    judge: CriticConfig = CriticConfig()
    verifier: dict[str, Any] = {"kind": "exact"}
    learn: LearnConfig = LearnConfig()
    repairs: dict[str, bool] = {}
    """Single repairs of the published algorithm, over the preset's."""
    nudge: NudgeConfig = NudgeConfig()
    gate: GateConfig = GateConfig()
    budget: BudgetConfig = BudgetConfig()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "config") -> Self:
        """Check a nested mapping.

        Raises:
            ConfigError: naming each key, its value, what is allowed and the nearest known key.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as exc:
            raise ConfigError(_explain(exc, cls, source)) from None

    @classmethod
    def from_toml(cls, path: Path | str, overrides: Sequence[str] = ()) -> Self:
        """Read a TOML file and apply `key.sub=value` overrides (values as TOML).

        Raises:
            ConfigError: the file is absent, not TOML, or a key is wrong.
        """
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"no config file {str(path)!r}: `tfgrpo init` writes one to start from"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{str(path)!r} is not TOML: {exc}") from exc
        for override in overrides:
            _apply_override(values, override)
        return cls.from_mapping(_resolve_paths(values, path.parent), str(path))

    def to_json(self) -> dict[str, Any]:
        """Return the resolved settings as JSON, for the journal; `nudge` only where it is on."""
        unused = {"nudge"} if self.nudge.kind == "off" else set()
        values: dict[str, Any] = json.loads(self.model_dump_json(exclude=unused))
        return values


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.strip().split(".")
    place = values
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ConfigError(f"override {override!r}: {section!r} is not a section")
    place[last] = value


def _resolve_paths(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    tasks = values.get("tasks")
    if isinstance(tasks, dict):
        for key in ("path", "traces"):
            if isinstance(tasks.get(key), str) and tasks[key]:
                tasks[key] = str(folder / tasks[key])
    return values


def _explain(exc: ValidationError, model: type[BaseModel], source: str) -> str:
    lines = []
    for error in exc.errors(include_url=False):
        key = ".".join(str(part) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            lines.append(f"{source}: unknown key {key!r}{_nearest(error['loc'], model)}")
        else:
            lines.append(f"{source}: {key} = {error['input']!r}: {error['msg']}")
    return "\n".join(lines)


def _nearest(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    known = model
    for part in loc[:-1]:
        field = known.model_fields.get(str(part))
        if field is None or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            return ""
        known = field.annotation
    names = sorted(known.model_fields)
    close = difflib.get_close_matches(str(loc[-1]), names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(names)}"


def check_names(given: Mapping[str, Any], record: type, where: str) -> None:
    """Check that every key of `given` is a field of the dataclass `record`.

    Raises:
        ConfigError: an unknown key, with the nearest known one.
    """
    names = sorted(f.name for f in fields(record))
    for key in given:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def read_tasks(path: Path | str) -> list[Task]:
    """Read tasks from JSONL: `task_id`, `prompt` (or `messages`), `reference`, `metadata`.

    Raises:
        ConfigError: no file, no rows, a line that is not an object, a missing or repeated id;
            the message names file and line.
    """
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, row in _rows(Path(path)):
        where = f"{str(path)!r} line {number}"
        task_id = row.get("task_id", row.get("id"))
        prompt = row.get("prompt", row.get("messages"))
        if not isinstance(task_id, (str, int)) or task_id == "":
            raise ConfigError(f"{where}: task_id is {task_id!r}: a non-empty text is needed")
        task_id = str(task_id)
        if task_id in seen:
            raise ConfigError(
                f"{where}: task_id {task_id!r} was used on line {seen[task_id]}: ids must be unique"
            )
        seen[task_id] = number
        if isinstance(prompt, list):
            prompt = tuple(_turn(turn, where) for turn in prompt)
        if not prompt or not isinstance(prompt, (str, tuple)):
            raise ConfigError(f"{where}: prompt is {prompt!r}: a text or a list of turns is needed")
        metadata = row.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise ConfigError(f"{where}: metadata is {metadata!r}: an object is needed")
        tasks.append(Task(task_id, prompt, row.get("reference"), metadata))
    if not tasks:
        raise ConfigError(f"{str(path)!r} holds no tasks: one JSON object a line is needed")
    return tasks


def _turn(value: Any, where: str) -> Message:
    role = value.get("role") if isinstance(value, dict) else None
    content = value.get("content") if isinstance(value, dict) else None
    if role not in get_args(Role) or not isinstance(content, (str, type(None))):
        raise ConfigError(
            f"{where}: turn {value!r:.100} is not an object with a role "
            f"({', '.join(get_args(Role))}) and a text as content"
        )
    try:
        return Message.from_dict(value)
    except (KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{where}: turn {value!r:.100}: {type(exc).__name__}: {exc}") from exc


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"no task file {str(path)!r}") from None
    except (UnicodeDecodeError, IsADirectoryError) as exc:
        raise ConfigError(f"{str(path)!r} cannot be read as UTF-8 text: {exc}") from exc
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as exc:
            raise ConfigError(f"{str(path)!r} line {number} is not JSON: {exc}") from exc
        if not isinstance(row, dict):
            raise ConfigError(f"{str(path)!r} line {number} is not a JSON object: {line!r:.100}")
        yield number, row
