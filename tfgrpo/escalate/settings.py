"""What a person may choose about an escalation; everything else follows from the run.

Does not know the run. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tfgrpo.config.sections import explain
from tfgrpo.errors import ConfigError

Say = Callable[[str], None]
"""Shows one line to a person."""

Method = Literal["auto", "supervised", "forward_kl", "reverse_kl", "nudge", "icpo", "none"]
"""How the library gets into the weights; `auto` lets the evidence choose, `none` leaves it out."""


class EscalateSettings(BaseModel):
    """Settings of one escalation. 0 or an empty text takes what the run used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = ""
    """`local:PATH`, `local:ORG/NAME` or `local:smollm2-135m`; empty takes the run's policy."""
    device: str | None = None
    """`cpu` or `cuda`; unset takes a GPU where there is one."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the weights that run; unset is bfloat16 where the device multiplies it."""
    method: Method = "auto"
    """How the library gets into the weights; `auto` lets the evidence choose, `none` leaves it
    out."""
    draws: int = Field(default=0, ge=0)
    """Rollouts a practice task with the library."""
    gate_draws: int = Field(default=0, ge=0)
    """Draws a gate task for each look."""
    test_draws: int = Field(default=0, ge=0)
    """Draws a test task for each arm of the final table."""
    epochs: int = Field(default=6, ge=1)
    """Of distillation, over the tasks that gave rows."""
    looks: int = Field(default=3, ge=1)
    """How often distillation is scored on the gate tasks; the best-scoring weights are kept."""
    tasks_per_step: int = Field(default=8, ge=1)
    """Tasks whose rows make one optimiser step."""
    rows_per_task: int = Field(default=4, ge=0)
    """Most frequent distinct replies of a task that are trained on; 0 takes all."""
    lr: float = Field(default=2e-5, gt=0)
    """Learning rate of distillation."""
    top_k: int = Field(default=0, ge=0)
    """Of the teacher's tokens kept a position by the divergences; 0 is exact."""
    grpo_steps: int | None = Field(default=None, ge=0)
    """None lets the evidence choose; 0 leaves GRPO out."""
    grpo_lr: float = Field(default=5e-6, gt=0)
    """Learning rate of GRPO."""
    lora_rank: int = Field(default=0, ge=0)
    """0 trains every weight."""
    seed: int = 0
    """Seeds every draw."""
    max_rows: int = Field(default=64, ge=1)
    """Rows decoded at once."""
    micro_batch_tokens: int = Field(default=4096, ge=16)
    """Input tokens of one forward; lower it when memory runs out."""

    @classmethod
    def of(cls, **values: object) -> Self:
        """Check values given by name.

        Raises:
            ConfigError: an unknown name or a value that is not allowed.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as exc:
            raise ConfigError(explain(exc, cls, "escalate")) from None
