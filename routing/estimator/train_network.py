"""Trains the small network.

    python -m tfgrpo.routing.estimator.train_network PROMPTS... --out routing/estimator

Only the texts are real. Outcomes are invented: in each world a set of prompts gets latent functions
(directions of the vectors, soft clusters, one noise a prompt), reference models and new models mix
them; the reference pool and the closed form are fitted as they would be in use, and the network
learns to correct the closed form on the new model's other prompts. So no recorded outcome of any
model is in the weights. Needs torch (extra `local`); a few minutes on one processor core.
Does not know the shared data sets: prompt files are arguments. Source: own; see `network`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import MissingExtraError
from tfgrpo.routing.estimator import network
from tfgrpo.routing.estimator.laplace import sigmoid
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import Layer, ValueModel, network_inputs
from tfgrpo.routing.records import ModelInfo, OutcomeTable
from tfgrpo.runtime.embedders import Embedder, Floats, VectorCache, open_embedder

Array = NDArray[np.float64]

_QUERIES = 64


@dataclass(frozen=True)
class NetworkTask:
    """One new model in one world: network inputs, and the outcomes to predict."""

    context: Floats
    queries: Floats
    cosines: Floats
    skip_mean: Floats
    skip_variance: Floats
    rates: Floats


def read_prompts(paths: Sequence[Path]) -> list[list[str]]:
    """Return the prompts of each JSON-lines file (plain or gzip, field `prompt`)."""
    found = []
    for path in paths:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        found.append([json.loads(line)["prompt"] for line in text.split("\n") if line])
    return found


def latent_functions(vectors: Array, rng: np.random.Generator, n: int) -> Array:
    """Return n random functions of the prompts, shape (prompts, n), mean 0 and spread 1."""
    columns = []
    for _ in range(n):
        kind = rng.random()
        if kind < 0.45:
            f = vectors @ rng.standard_normal(vectors.shape[1])
        elif kind < 0.85:
            centres = vectors[rng.integers(len(vectors), size=int(rng.integers(3, 25)))]
            weight = np.exp(vectors @ centres.T * rng.uniform(4, 20))
            weight /= weight.sum(axis=1, keepdims=True)
            f = weight @ rng.standard_normal(len(centres))
        else:
            near = vectors @ vectors[rng.integers(len(vectors))]
            f = np.tanh(rng.uniform(3, 12) * (near - np.quantile(near, rng.uniform(0.2, 0.9))))
        columns.append((f - f.mean()) / (f.std() + 1e-9))
    return np.column_stack(columns)


def world(
    texts: int, vectors: Floats, rng: np.random.Generator, embedder: Embedder, n_new: int
) -> tuple[ReferencePool, Array, NDArray[np.intp], NDArray[np.intp]]:
    """Invent outcomes on some prompts; return the pool, new models' chances, and the two sides."""
    X = vectors.astype(np.float64)
    n_ref = 0 if rng.random() < 0.2 else int(rng.integers(2, 20))
    n = n_ref + n_new
    shared = latent_functions(X, rng, 6)
    strength = rng.gamma(2.0, 0.5, size=6) * rng.uniform(0.2, 0.8)
    common = shared[:, 0] * rng.uniform(0.2, 1.6)
    noise = rng.standard_normal(texts) * rng.uniform(0.0, 1.8)
    own = latent_functions(X, rng, n)
    level = rng.normal(rng.normal(0.2, 0.6), rng.uniform(0.3, 1.2), size=n)
    slope = np.clip(rng.normal(1.0, 0.3, size=n), 0.2, 2.0)
    mix = rng.standard_normal((6, n)) * strength[:, None] * 0.7
    f = level + (common + noise)[:, None] * slope + shared @ mix
    f += own * rng.gamma(1.5, 0.35, size=n)
    chance = sigmoid(f)
    order = rng.permutation(texts)
    train, test = order[: int(0.7 * texts)], order[int(0.7 * texts) :]
    if not n_ref:
        return ReferencePool.empty(embedder.embedder_id, X.shape[1]), chance, train, test
    outcomes = (rng.random((len(train), n_ref)) < chance[train][:, n_new:]).astype(np.float64)
    table = OutcomeTable(
        keys=tuple(str(i) for i in train),
        prompts=tuple(str(i) for i in train),
        datasets=("",) * len(train),
        models=tuple(ModelInfo(f"r{j}") for j in range(n_ref)),
        successes=outcomes,
        trials=np.ones_like(outcomes),
    )
    pool = ReferencePool.fit(table, vectors[train], embedder_id=embedder.embedder_id)
    return pool, chance, train, test


def make_tasks(
    prompt_vectors: Sequence[Floats], embedder: Embedder, n_worlds: int, seed: int
) -> list[NetworkTask]:
    """Return the tasks of `n_worlds` worlds, 16 new models each."""
    rng = np.random.default_rng(seed)
    tasks = []
    closed: tuple[Layer, ...] = ("level", "difficulty", "axes")
    for _ in range(n_worlds):
        source = prompt_vectors[int(rng.integers(len(prompt_vectors)))]
        size = min(len(source), int(rng.integers(600, 1801)))
        vectors = source[rng.permutation(len(source))[:size]]
        pool, chance, train, test = world(size, vectors, rng, embedder, 16)
        value = ValueModel(embedder, pool, layers=closed)
        for j in range(16):
            n = int(min(round(math.exp(rng.uniform(math.log(8), math.log(1024)))), len(train)))
            rows = rng.permutation(train)[:n]
            trials = np.ones(n) if rng.random() < 0.7 else rng.integers(1, 11, size=n).astype(float)
            counts = rng.binomial(trials.astype(int), chance[rows, j]).astype(np.float64)
            state = value.state_of_counts(
                vectors[rows], counts, trials, keys=[str(i) for i in rows]
            )
            asked = rng.permutation(test)[:_QUERIES]
            inputs = network_inputs(state, vectors[asked].astype(np.float64))
            labels = (rng.random(len(asked)) < chance[asked, j]).astype(np.float32)
            tasks.append(
                NetworkTask(
                    inputs.context,
                    inputs.queries,
                    inputs.cosines,
                    inputs.skip.mean.astype(np.float32),
                    inputs.skip.variance.astype(np.float32),
                    labels,
                )
            )
    return tasks


def _initial(torch: Any, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    d, up = network.WIDTH, 2 * network.WIDTH

    def dense(rows: int, columns: int, gain: float = 1.0) -> Any:
        return torch.randn(rows, columns, generator=generator) * gain / math.sqrt(rows)

    w = {
        "context_in": dense(network.N_CONTEXT, d),
        "context_in_bias": torch.zeros(d),
        "context_out": dense(d, d),
        "context_out_bias": torch.zeros(d),
        "query_in": dense(network.N_QUERY, d),
        "query_in_bias": torch.zeros(d),
        "query_out": dense(d, d),
        "query_out_bias": torch.zeros(d),
        "head": torch.zeros(d),
        "head_bias": torch.zeros(1),
    }
    for layer in range(network.LAYERS_DEEP):
        w |= {f"{layer}.{name}": dense(d, d) for name in ("q", "k", "v", "o")}
        w[f"{layer}.cosine"] = torch.tensor([1.0, 3.0, 6.0, 10.0])
        w[f"{layer}.null"] = torch.zeros(d)
        w[f"{layer}.null_bias"] = torch.full((network.HEADS,), 3.0)
        w[f"{layer}.up"], w[f"{layer}.up_bias"] = dense(d, up), torch.zeros(up)
        w[f"{layer}.down"], w[f"{layer}.down_bias"] = dense(up, d, 0.3), torch.zeros(d)
    return {name: tensor.requires_grad_(True) for name, tensor in w.items()}


def _forward(torch: Any, w: dict[str, Any], task: NetworkTask) -> Any:
    """The same computation as `Network.correct`, in torch; a test holds the two together."""
    gelu = torch.nn.functional.gelu

    def norm(x: Any) -> Any:
        return torch.nn.functional.layer_norm(x, (x.shape[-1],), eps=1e-5)

    c, q = torch.from_numpy(task.context), torch.from_numpy(task.queries)
    cosines = torch.from_numpy(task.cosines)
    h = gelu(c @ w["context_in"] + w["context_in_bias"], approximate="tanh")
    h = norm(h @ w["context_out"] + w["context_out_bias"])
    x = gelu(q @ w["query_in"] + w["query_in_bias"], approximate="tanh") @ w["query_out"]
    x = x + w["query_out_bias"]
    heads, size = network.HEADS, network.WIDTH // network.HEADS
    for layer in range(network.LAYERS_DEEP):
        query = (norm(x) @ w[f"{layer}.q"]).view(-1, heads, size).transpose(0, 1)
        key = (h @ w[f"{layer}.k"]).view(-1, heads, size).transpose(0, 1)
        value = (h @ w[f"{layer}.v"]).view(-1, heads, size).transpose(0, 1)
        score = query @ key.transpose(1, 2) / math.sqrt(size)
        score = score + w[f"{layer}.cosine"][:, None, None] * cosines
        null = (query * w[f"{layer}.null"].view(heads, 1, size)).sum(-1)
        null = (null + w[f"{layer}.null_bias"][:, None])[..., None]
        share = torch.softmax(torch.cat([score, null], dim=-1), dim=-1)[..., :-1]
        mixed = (share @ value).transpose(0, 1).reshape(-1, network.WIDTH)
        x = x + mixed @ w[f"{layer}.o"]
        up = gelu(norm(x) @ w[f"{layer}.up"] + w[f"{layer}.up_bias"], approximate="tanh")
        x = x + up @ w[f"{layer}.down"] + w[f"{layer}.down_bias"]
    return norm(x) @ w["head"] + w["head_bias"]


def _loss(torch: Any, w: dict[str, Any], task: NetworkTask, *, closed: bool = False) -> Any:
    f, v = torch.from_numpy(task.skip_mean), torch.from_numpy(task.skip_variance)
    if not closed:
        f = f + _forward(torch, w, task)
    logits = f / torch.sqrt(1 + math.pi / 8 * v)
    return torch.nn.functional.binary_cross_entropy_with_logits(
        logits, torch.from_numpy(task.rates)
    )


def train(
    tasks: Sequence[NetworkTask], *, steps: int, batch: int, seed: int, rate: float = 2e-3
) -> dict[str, NDArray[np.float16]]:
    """Return trained weights: AdamW, cosine decay with warm-up, clipped gradients."""
    try:
        import torch
    except ImportError:
        raise MissingExtraError.of("local", "training the routing network", "torch") from None
    torch.set_num_threads(1)
    w = _initial(torch, seed)
    optimiser = torch.optim.AdamW(w.values(), lr=rate, weight_decay=0.01)
    rng = np.random.default_rng(seed)
    for step in range(steps):
        warm = min(1.0, (step + 1) / 50)
        for group in optimiser.param_groups:
            group["lr"] = rate * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimiser.zero_grad()
        for i in rng.integers(len(tasks), size=batch):
            (_loss(torch, w, tasks[i]) / batch).backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        optimiser.step()
    return {name: t.detach().numpy().astype(np.float16) for name, t in w.items()}


def validate(
    weights: dict[str, NDArray[np.float16]], tasks: Sequence[NetworkTask]
) -> dict[str, float]:
    """Return the log loss of the closed form and of the network on tasks that it has not seen."""
    import torch

    w = {name: torch.from_numpy(a.astype(np.float32)) for name, a in weights.items()}
    with torch.no_grad():
        closed = [float(_loss(torch, w, t, closed=True)) for t in tasks]
        corrected = [float(_loss(torch, w, t)) for t in tasks]
    return {
        "logloss_closed_form": round(float(np.mean(closed)), 5),
        "logloss_network": round(float(np.mean(corrected)), 5),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, judge on held-out worlds, write `network.npz` and its card `network.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="+", type=Path, help="JSON lines with a field 'prompt'")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--embedder", default="minilm:bf16")
    parser.add_argument("--vectors", type=Path, help="folder of cached vectors")
    parser.add_argument("--worlds", type=int, default=80)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    embedder: Embedder = open_embedder(options.embedder)
    if options.vectors is not None:
        embedder = VectorCache(embedder, options.vectors)
    vectors = [embedder.embed(texts) for texts in read_prompts(options.prompts)]
    began = time.process_time()
    tasks = make_tasks(vectors, embedder, options.worlds, options.seed)
    held_out = make_tasks(vectors, embedder, max(options.worlds // 8, 1), options.seed + 1)
    weights = train(tasks, steps=options.steps, batch=8, seed=options.seed)
    numbers = validate(weights, held_out)
    path = options.out / "network.npz"
    with path.open("wb") as file:
        np.savez_compressed(file, **weights)  # type: ignore[arg-type]
    raw = path.read_bytes()
    card = {
        "made_by": "python -m tfgrpo.routing.estimator.train_network",
        "data": {
            "texts": {p.parent.name: len(v) for p, v in zip(options.prompts, vectors, strict=True)},
            "outcomes": "invented; no recorded outcome of any model",
            "embedder": embedder.embedder_id,
        },
        "seed": options.seed,
        "worlds": options.worlds,
        "tasks": len(tasks),
        "steps": options.steps,
        "parameters": int(sum(a.size for a in weights.values())),
        "bytes": len(raw),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "train_cpu_s": round(time.process_time() - began, 1),
        "held_out_worlds": numbers,
    }
    (options.out / "network.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(card))
    return card


if __name__ == "__main__":
    main()
