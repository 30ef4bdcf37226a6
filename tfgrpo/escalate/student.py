"""The model that is trained, as something that draws groups: weights, prompts, sampler, verifier.

Practice, looks and the final table all draw through it, with the run's own system text, sampling
and verifier, so that models differ in nothing but their weights. Its speed is measured, not
assumed. Does not know what is drawn for which purpose. Source: own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tfgrpo.config.learn import Config
from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.errors import ConfigError
from tfgrpo.escalate.settings import EscalateSettings
from tfgrpo.protocols import Sampling, Verifier
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel, load_parts
from tfgrpo.rl.distillation.fresh_groups import Draw, Wanted, drawer
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.model.packing import Row, pack
from tfgrpo.rl.rollouts.grading import Grader
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.single_turn import SingleTurnMaker
from tfgrpo.rl.rollouts.turn_tools import TurnText
from tfgrpo.rl.rollouts.turns import TurnTokens
from tfgrpo.rollout import RolloutGroup, Task

DEFAULT_REPLY = 512
"""Tokens of a reply where the run's sampling sets no limit."""

ContextOf = Callable[[Task], Context]


def bare(task: Task) -> Context:
    """Return the empty context: the bare prompt."""
    del task
    return EMPTY_CONTEXT


def model_spec(config: Config, settings: EscalateSettings) -> str:
    """Return the `local:` spec of the model to train.

    Raises:
        ConfigError: neither the settings nor the run name a model with weights.
    """
    spec = settings.model or config.policy.lm
    if not spec.startswith("local:"):
        raise ConfigError(
            f"{spec!r} cannot be trained: its weights are not here. Say which local model learns "
            "from this run: --model local:PATH, local:ORG/NAME or local:smollm2-135m"
        )
    return spec


def student_sampling(config: Config) -> Sampling:
    """Return how the run's policy draws, as the trainer's sampler understands it."""
    sampling = config.policy.sampling
    return Sampling(
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens or DEFAULT_REPLY,
        stop=sampling.stop,
    )


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured on this machine with this model, in tokens a second."""

    prefill: float
    """Tokens read in one forward."""
    decode: float
    """Tokens made, over all rows."""

    @property
    def train(self) -> float:
        """Forward and backward: three times a forward (approximation)."""
        return self.prefill / 3


class Student:
    """One version of the model.

    Args:
        spec: `local:…`, of the start or of a trained folder.
        config: the run's settings.
        settings: the escalation's.
        verifier: judges replies.
        label: names the weights in groups' ids; equal labels must mean equal weights.
    """

    def __init__(
        self,
        spec: str,
        config: Config,
        settings: EscalateSettings,
        verifier: Verifier,
        label: str,
    ) -> None:
        self._config = config
        self._settings = settings
        self._verifier = verifier
        self.spec = spec
        self.sampling = student_sampling(config)
        self.parts: LoadedModel = load_parts(spec, device=settings.device, dtype=settings.dtype)
        template = "chat" if getattr(self.parts.tokenizer, "chat_template", None) else "plain"
        self.template = template
        self.prompts = Prompter(
            self.parts.tokenizer,
            system=config.policy.system,
            template=template,
            context_tokens=self.parts.decoder.shape.context,
        )
        self._generator = GroupGenerator(
            self.parts.decoder,
            eos_ids=self.parts.eos_ids,
            detokenize=lambda ids: str(self.parts.tokenizer.decode(list(ids))),
            max_rows=settings.max_rows,
        )
        self.label = label

    @property
    def end_id(self) -> int:
        """The token that ends a turn."""
        tokenizer: Any = self.parts.tokenizer
        own = tokenizer.eos_token_id
        return int(own if own in self.parts.eos_ids else self.parts.eos_ids[0])

    @property
    def turns(self) -> TurnTokens:
        """Renders answers between turns."""
        eos_ids = tuple(self.parts.eos_ids)
        return TurnText(self.parts.tokenizer, template=self.template, eos_ids=eos_ids)

    def draw(self, label: str | None = None) -> Draw:
        """Return what draws groups from the weights as they are; the label names them."""
        maker = SingleTurnMaker(
            self._generator,
            Grader(
                self.prompts,
                self._verifier,
                "grade" if self._config.run.on_truncated == "grade" else "exclude",
                self._config.run.timeout_s,
            ),
            self.sampling,
            policy_id=f"escalate:{label or self.label}",
        )
        return drawer(maker)

    def groups(
        self,
        tasks: Sequence[Task],
        n: int,
        seed: int,
        context_of: ContextOf = bare,
        *,
        label: str | None = None,
    ) -> list[RolloutGroup]:
        """Return one group of n a task; the same seed gives every model the same draws."""
        return self.draw(label)([Wanted(t, context_of(t), n) for t in tasks], seed)

    def release(self) -> None:
        """Give back what drawing and training left: caches and gradients, not the weights."""
        self._generator.release()
        for parameter in self.parts.decoder.parameters():
            parameter.grad = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def export(self, folder: Path, write: Callable[[Path], None]) -> str:
        """Write the model by `write` so that the folder appears whole; return its spec."""
        part = folder.with_name(f".{folder.name}.part")
        _remove(part)
        part.mkdir(parents=True)
        write(part)
        _remove(folder)
        part.rename(folder)
        return f"local:{folder}"

    def measure(self) -> Speed:
        """Read and make some tokens and return how fast that was; about a second on a CPU."""
        n = min(256, self.parts.decoder.shape.context // 2)
        ids = tuple(i % 50 + 3 for i in range(n))
        packed = pack([Row(0, ids[:-1], ids[-1:])], device=self.parts.decoder.embed.device)
        made = 8
        requests = [ids[: n // 4]] * 4
        sampling = replace(self.sampling, max_tokens=made, stop=(), extra={"ignore_eos": True})
        seeds = [list(range(self._settings.max_rows // 4 or 1)) for _ in requests]
        rows = sum(map(len, seeds))

        def read() -> None:
            with torch.no_grad():
                self.parts.decoder(packed)

        def make() -> None:
            self._generator.generate(requests, len(seeds[0]), sampling, seeds)

        return Speed(prefill=n / _seconds(read), decode=rows * made / _seconds(make))


def _seconds(work: Callable[[], None]) -> float:
    """The second of two runs: the first one compiles and warms."""
    taken = 0.0
    for _ in range(2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken = time.perf_counter() - started
    return max(taken, 1e-6)


def _remove(folder: Path) -> None:
    import shutil

    if folder.exists():
        shutil.rmtree(folder)
