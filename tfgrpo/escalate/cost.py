"""What an escalation will cost before it starts: rollouts, tokens, seconds and memory by stage.

Prompt tokens are counted with the model's own tokenizer. Replies run from a short answer to the
limit; what is trained is at most what is drawn. Seconds come from the measured speed of this
model on this machine (the middle of the replies' range), so they are an approximation.

Does not know how stages work. Source: own; memory is the sum of what AdamW on float32 masters
holds and of the largest activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from tfgrpo.escalate.plan import TrainingPlan
from tfgrpo.escalate.run_data import Material
from tfgrpo.escalate.settings import EscalateSettings
from tfgrpo.escalate.student import ContextOf, Speed, Student, bare
from tfgrpo.rl.model.shape import Shape
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rollout import Task
from tfgrpo.runtime.durations import duration_words

SHORT_REPLY = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of draws, resolved."""

    draws: int
    gate: int
    test: int

    @classmethod
    def of(cls, material: Material, settings: EscalateSettings) -> Sizes:
        """Take what the run used where the settings say nothing."""
        learn, gate = material.config.learn, material.config.gate
        return cls(
            draws=settings.draws or learn.group_size,
            gate=settings.gate_draws or gate.group_size,
            test=settings.test_draws or gate.test_group_size,
        )


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage; tokens are totals."""

    stage: str
    rollouts: int
    prompt_tokens: int
    completion_low: int
    completion_high: int
    trained_tokens: int
    """Tokens forward and backward, prompts included, all epochs."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Cost:
    """All stages, and the memory that training takes at its peak."""

    stages: tuple[StageCost, ...]
    memory_bytes: int
    speed: Speed

    @property
    def seconds(self) -> float:
        """Of all stages."""
        return sum(s.seconds for s in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "stages": [s.to_dict() for s in self.stages],
            "seconds": self.seconds,
            "memory_bytes": self.memory_bytes,
            "speed": asdict(self.speed),
        }

    def lines(self) -> list[str]:
        """Return the forecast for people."""
        rows = [
            f"{'stage':<16}{'rollouts':>9}{'prompt tokens':>15}{'reply tokens':>20}"
            f"{'trained':>10}{'time':>14}"
        ]
        rows += [
            f"{s.stage:<16}{s.rollouts:>9}{s.prompt_tokens:>15}"
            f"{f'{s.completion_low} to {s.completion_high}':>20}{s.trained_tokens:>10}"
            f"{'≈' + duration_words(s.seconds):>14}"
            for s in self.stages
        ]
        gigabytes = self.memory_bytes / 1e9
        rows.append(
            f"in all about {duration_words(self.seconds)}, measured at {self.speed.prefill:.0f} "
            f"tokens read and {self.speed.decode:.0f} made a second; memory at the peak about "
            f"{gigabytes:.1f} GB"
        )
        return rows


def forecast_cost(
    material: Material, settings: EscalateSettings, plan: TrainingPlan, student: Student
) -> Cost:
    """Return what the plan will take at most, at the student's measured speed."""
    prompts, speed = student.prompts, student.measure()
    max_tokens = student.sampling.max_tokens or 1
    decoder = student.parts.decoder
    sizes = Sizes.of(material, settings)

    def drawn(
        stage: str, tasks: Sequence[Task], n: int, *contexts: ContextOf, times: int = 1
    ) -> StageCost:
        read = times * sum(len(prompts.ids(t, c(t))) for t in tasks for c in contexts)
        rollouts = times * n * len(tasks) * len(contexts)
        return _stage(stage, rollouts, read, max_tokens, 0, speed)

    stages: list[StageCost] = []
    if plan.draws_library and material.has_library:
        stages.append(drawn("draws", material.practice, sizes.draws, material.context))
    if plan.distil != "none":
        stages.append(_distil(material, settings, plan, prompts, speed, max_tokens, sizes))
        looks = min(settings.looks, settings.epochs)
        stages.append(drawn("looks", material.gate, sizes.gate, bare, times=looks + 1))
    if plan.grpo_steps:
        stages.append(drawn("profile", material.practice, sizes.draws, bare))
        stages.append(_grpo(material, plan, prompts, speed, max_tokens, sizes))
        stages.append(drawn("look", material.gate, sizes.gate, bare))
    arms = (bare, material.context) if material.has_library else (bare,)
    stages.append(drawn("table", material.test, sizes.test, *arms, times=2))
    told = max(len(prompts.ids(t, material.context(t))) for t in material.practice)
    memory = training_bytes(decoder.shape, sum(p.numel() for p in decoder.parameters()), settings)
    memory += cache_bytes(decoder.shape, settings.max_rows, told + max_tokens)
    return Cost(tuple(stages), memory, speed)


def _stage(
    name: str, rollouts: int, read: int, max_tokens: int, trained: int, speed: Speed
) -> StageCost:
    low, high = SHORT_REPLY * rollouts, max_tokens * rollouts
    made = (min(low, high) + high) / 2
    seconds = read / speed.prefill + made / speed.decode + trained / speed.train
    return StageCost(name, rollouts, read, min(low, high), high, trained, seconds)


def _mean_tokens(values: Sequence[int]) -> float:
    return fmean(values) if values else 0.0


def _distil(
    material: Material,
    settings: EscalateSettings,
    plan: TrainingPlan,
    prompts: Prompter,
    speed: Speed,
    max_tokens: int,
    sizes: Sizes,
) -> StageCost:
    own = [len(prompts.ids(t)) for t in material.practice]
    told = [len(prompts.ids(t, material.context(t))) for t in material.practice]
    n = len(material.practice)
    if plan.distil in ("nudge", "icpo"):
        rollouts = settings.epochs * n * 8
        read = round(settings.epochs * sum(told))
        trained = round(settings.epochs * (sum(told) + sum(own) + n * 16 * max_tokens))
        return _stage("distil", rollouts, read, max_tokens, trained, speed)
    rows = min(sizes.draws, settings.rows_per_task or sizes.draws)
    if plan.distil != "supervised":
        rows = sizes.draws
    trained = round(settings.epochs * n * (_mean_tokens(own) + rows * max_tokens))
    read = sum(told) if plan.distil in ("forward_kl", "reverse_kl") else 0
    return _stage("distil", 0, read, max_tokens, trained, speed)


def _grpo(
    material: Material,
    plan: TrainingPlan,
    prompts: Prompter,
    speed: Speed,
    max_tokens: int,
    sizes: Sizes,
) -> StageCost:
    own = _mean_tokens([len(prompts.ids(t)) for t in material.practice])
    tasks = min(GRPO_TASKS, len(material.practice))
    levels = 4 if plan.hints else 1
    rollouts = plan.grpo_steps * tasks * sizes.draws * levels
    read = round(plan.grpo_steps * tasks * levels * own)
    trained = round(plan.grpo_steps * tasks * (own + sizes.draws * max_tokens))
    return _stage("grpo", rollouts, read, max_tokens, trained, speed)


GRPO_TASKS = 8
"""Tasks of one GRPO step."""


def training_bytes(shape: Shape, parameters: int, settings: EscalateSettings) -> int:
    """Return about how many bytes training holds at its peak.

    Weights (4 bytes at most), and for trained weights float32 master, gradient and two moments;
    activations of one micro-batch (about 34 bytes a token, layer and hidden unit); one chunk of
    logits of both sides with their gradients. An approximation.
    """
    weights = 4 * parameters
    trained = parameters
    if settings.lora_rank:
        per_layer = 4 * shape.hidden + 2 * (shape.q_size + shape.kv_size) + 3 * shape.intermediate
        trained = 2 * settings.lora_rank * shape.layers * per_layer
    states = 16 * trained + (8 * parameters if settings.lora_rank else 0)
    activations = 34 * settings.micro_batch_tokens * shape.layers * shape.hidden
    logits = 4 * 4 * min(1024, settings.micro_batch_tokens) * shape.vocab
    return weights + states + activations + logits


def cache_bytes(shape: Shape, rows: int, length: int) -> int:
    """Return the bytes of the sampler's keys and values at 4 bytes a number."""
    return 4 * 2 * rows * length * shape.layers * shape.kv_size
