"""Made-up outcome tables: topics of different difficulty, models of different skill; groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task
from tfgrpo.routing.estimator.laplace import sigmoid
from tfgrpo.routing.records import ModelInfo, OutcomeTable, SuccessCount
from tfgrpo.runtime.embedders import Floats, HashedNgrams

TOPICS = {
    "integral": "compute the integral of the function",
    "proof": "prove the theorem on prime numbers",
    "python": "write a python function that sorts",
    "json": "parse this json document of the shop",
    "capital": "name the capital city of the country",
    "poem": "compose a short poem about the sea",
}


@dataclass(frozen=True)
class World:
    """A table, its vectors and the true chances."""

    table: OutcomeTable
    vectors: Floats
    chance: NDArray[np.float64]
    embedder: HashedNgrams


def make_world(
    n_prompts: int = 400, n_models: int = 8, *, seed: int = 0, trials: int = 1, width: int = 64
) -> World:
    """Return a world; models come in families of two."""
    rng = np.random.default_rng(seed)
    names = list(TOPICS)
    topic = rng.integers(len(names), size=n_prompts)
    prompts = tuple(f"{TOPICS[names[t]]} number {i}" for i, t in enumerate(topic))
    difficulty = np.linspace(-2.0, 2.0, len(names))[topic] + 0.5 * rng.standard_normal(n_prompts)
    level = rng.normal(0.0, 0.7, size=n_models)
    taste = 0.5 * rng.standard_normal((len(names), n_models))
    chance = sigmoid(difficulty[:, None] + level + taste[topic])
    successes = rng.binomial(trials, chance).astype(np.float64)
    embedder = HashedNgrams(width)
    table = OutcomeTable(
        keys=tuple(f"p{i}" for i in range(n_prompts)),
        prompts=prompts,
        datasets=tuple(names[t] for t in topic),
        models=tuple(ModelInfo(f"m{j}", f"f{j // 2}") for j in range(n_models)),
        successes=successes,
        trials=np.full_like(successes, trials),
    )
    return World(table, embedder.embed(prompts), chance, embedder)


def outcomes(n: int, *, model: str = "m", rate: float = 0.5, seed: int = 0) -> list[SuccessCount]:
    """Return n single-trial outcomes on distinct prompts."""
    rng = np.random.default_rng(seed)
    texts = list(TOPICS.values())
    return [
        SuccessCount(f"{texts[i % len(texts)]} case {i}", model, float(rng.random() < rate))
        for i in range(n)
    ]


def tasks(n: int) -> list[Task]:
    """Return n tasks, `t0` upwards."""
    return [Task(f"t{i}", f"task {i}") for i in range(n)]


def group(task_id: str, k: int, n: int, step: int = 0) -> RolloutGroup:
    """Return a group of n graded rollouts of a task of `tasks`, the first k of them successes."""
    task = Task(task_id, task_id.replace("t", "task "))
    rollouts = tuple(
        Rollout(f"{task_id}-{step}-{i}", task_id, outcome="graded", score=Score(float(i < k)))
        for i in range(n)
    )
    return RolloutGroup(f"g-{task_id}-{step}", task, rollouts)
