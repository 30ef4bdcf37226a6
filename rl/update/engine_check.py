"""Checks an engine that was handed new weights by a few short draws against the trainer's scores.

The gate compares a step's rows with the weights that sampled them, which are gone where the next
step is sampled while this one is trained; there this check takes its place, after every hand-over.
Does not know how weights travel. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfgrpo.protocols import Generator, Sampling
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.update.accumulate import TrainRow
from tfgrpo.rl.update.logprob_mismatch import Mismatch
from tfgrpo.rl.update.updater import Updater
from tfgrpo.runtime.canonical import derive_seed

PROMPTS = 16
"""Prompts of the step that are drawn for."""
TOKENS = 32
"""Tokens of a draw; old weights show within them."""


def check_engine(
    engine: Generator, updater: Updater, config: TrainConfig, rows: Sequence[TrainRow], step: int
) -> Mismatch | None:
    """Return how far an engine's log-probs lie from the trainer's, on prompts of a step.

    Raises:
        ConfigError: further than the run allows.
    """
    prompts = list(dict.fromkeys(r.row.prompt_ids for r in rows))[:PROMPTS]
    if not prompts:
        return None
    seeds = [[derive_seed(config.run.seed, "check", step, i)] for i in range(len(prompts))]
    most = min(TOKENS, config.rollout.max_tokens)
    made = engine.generate(prompts, 1, Sampling(temperature=1.0, max_tokens=most), seeds)
    drawn = [
        TrainRow(Row(i, prompt, found.token_ids), 0.0, engine_logp=found.logprobs)
        for i, (prompt, (found,)) in enumerate(zip(prompts, made, strict=True))
        if found.token_ids
    ]
    return updater.gate(drawn, updater.score(drawn, temperature=1.0), step)
