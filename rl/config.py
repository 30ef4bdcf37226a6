"""Settings of a training run: one frozen model, TOML, every mistake named.

Does not know how a setting is used, except which of them contradict each other.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tfgrpo.config import _apply_override, _explain
from tfgrpo.errors import ConfigError
from tfgrpo.rl.advantages import ADVANTAGES
from tfgrpo.rl.aggregations import AGGREGATIONS
from tfgrpo.rl.losses import LOSSES
from tfgrpo.rl.registry import lookup


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """What is trained."""

    lm: str = "local:smollm2-135m"
    """`local:smollm2-135m`, `local:PATH` or `local:ORG/NAME`."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the weights that run; None is bfloat16 where the device multiplies it."""
    device: str | None = None
    """`cpu` or `cuda`; None takes a GPU where there is one."""
    system: str = ""
    """System text of the prompt."""
    template: Literal["chat", "plain"] = "chat"
    """`plain` joins the turns' texts, for models whose tokenizer has no chat template."""
    lora_rank: int = Field(default=0, ge=0)
    """0 trains every weight."""
    lora_alpha: float = Field(default=32.0, gt=0)
    lora_targets: tuple[str, ...] = ()
    """Projections to adapt; empty means all seven."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""


class TasksConfig(_Section):
    """What is practised and what is held out."""

    path: str = ""
    """JSONL of training tasks."""
    held_out: str = ""
    """JSONL of evaluation tasks; never trained on, never hinted."""


class RolloutConfig(_Section):
    """How groups are made."""

    tasks_per_step: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=1)
    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: tuple[str, ...] = ()
    max_rows: int = Field(default=256, ge=1)
    """Rows decoded at once; the cache's memory grows with it."""
    poll_steps: int = Field(default=16, ge=1)
    fixed_rows: bool = False
    """Decode with a constant row count: bit-exact under any batch, slower at the tail."""
    ignore_eos: bool = False
    """Every completion reaches `max_tokens` (for measurements)."""
    on_truncated: Literal["grade", "drop"] = "grade"
    """Judge a reply that hit its limit, or leave it out of its group."""
    verifier_timeout_s: float = Field(default=120.0, gt=0)
    mismatch_mean: float = Field(default=0.1, gt=0)
    """Mean |Δ log-prob| between generator and trainer, nats, beyond which training stops.
    bfloat16 logits alone give 0.01 to 0.04 (measured on an H100)."""


class LossConfig(_Section):
    """What is minimised."""

    name: str = "clip"
    options: dict[str, float] = {}
    aggregation: str = "token_mean"
    advantage: str = "grpo"
    advantage_options: dict[str, float] = {}
    kl: float = Field(default=0.0, ge=0)
    """Weight of the k3 estimate of KL(policy ‖ start)."""
    entropy: float = 0.0
    """Weight of an entropy bonus."""
    log_entropy: bool = False
    skip_zero_advantage: bool = True
    """Leave rows without a gradient out of the forward; exact, since they still count in the
    normaliser."""


class OptimiserConfig(_Section):
    """How weights move."""

    steps: int = Field(default=100, ge=1)
    lr: float = Field(default=1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_norm: float = Field(default=1.0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epochs_per_batch: int = Field(default=1, ge=1)
    """How often a batch of groups is used."""
    updates_per_epoch: int = Field(default=1, ge=1)
    """Optimiser batches that a batch of groups is cut into."""
    micro_batch_tokens: int = Field(default=8192, ge=16)
    """Input tokens of one forward; lower it when memory runs out."""
    vocabulary_chunk: int = Field(default=2048, ge=1)
    """Tokens whose logits exist at once."""


class RunConfig(_Section):
    """Where the run lives."""

    folder: str = "runs/train"
    seed: int = 0
    save_every: int = Field(default=50, ge=1)
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    evaluate_every: int = Field(default=0, ge=0)
    """Steps between held-out evaluations; 0 evaluates at the end only."""
    evaluate_draws: int = Field(default=1, ge=1)
    evaluate_temperature: float = Field(default=0.0, ge=0)
    deterministic: bool = True
    """Equal runs give equal bits on the same machine."""
    tensorboard: bool = False
    tracker: Literal["", "wandb", "trackio"] = ""


class TrainConfig(_Section):
    """Everything that a training run can be told."""

    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    verifier: dict[str, Any] = {"kind": "exact"}
    rollout: RolloutConfig = RolloutConfig()
    loss: LossConfig = LossConfig()
    hints: dict[str, Any] = {}
    """`name` of a hint scheduler and its options; empty for none."""
    optimiser: OptimiserConfig = OptimiserConfig()
    run: RunConfig = RunConfig()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "config") -> Self:
        """Check a nested mapping.

        Raises:
            ConfigError: naming each key, its value, what is allowed and the nearest known key.
        """
        try:
            config = cls.model_validate(values)
        except ValidationError as exc:
            raise ConfigError(_explain(exc, cls, source)) from None
        config.check()
        return config

    @classmethod
    def from_toml(cls, path: Path | str, overrides: Sequence[str] = ()) -> Self:
        """Read a TOML file and apply `section.key=value` overrides; paths are relative to it.

        Raises:
            ConfigError: the file is absent, not TOML, or a key is wrong.
        """
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise ConfigError(f"config file {str(path)!r} cannot be read: {exc.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{str(path)!r} is not TOML: {exc}") from exc
        for key in ("path", "held_out"):
            given = values.get("tasks", {}).get(key)
            if isinstance(given, str) and given:
                values["tasks"][key] = str(path.parent / given)
        for override in overrides:
            _apply_override(values, override)
        return cls.from_mapping(values, str(path))

    def check(self) -> None:
        """Raise `ConfigError` for settings that contradict each other."""
        lookup(LOSSES, "loss", self.loss.name)
        lookup(AGGREGATIONS, "aggregation", self.loss.aggregation)
        lookup(ADVANTAGES, "advantage", self.loss.advantage)
        if self.rollout.top_p < 1:
            raise ConfigError(
                f"rollout.top_p is {self.rollout.top_p}: a truncated draw comes from another "
                "distribution than the one trained, so probability ratios would be wrong; use 1"
            )
        if self.rollout.group_size == 1 and self.loss.advantage == "grpo":
            raise ConfigError(
                "rollout.group_size is 1: a group of one has no baseline; use 2 or more"
            )
        if self.optimiser.updates_per_epoch > self.rollout.tasks_per_step:
            raise ConfigError(
                f"optimiser.updates_per_epoch {self.optimiser.updates_per_epoch} is more than the "
                f"{self.rollout.tasks_per_step} groups of a step; groups are never split"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the resolved settings as JSON."""
        values: dict[str, Any] = json.loads(self.model_dump_json())
        return values
