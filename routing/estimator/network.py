"""A small prior-fitted network: corrects the log odds of the closed form from its residuals.

Relational: a token holds what the closed form said of a context prompt when it was left out, by how
much it was wrong, and the reference profile; never the vector. Attention of a query to the context
is biased by a learned multiple of the cosine between prompts, so no prompt can be memorised and any
embedder fits. Context tokens do not look at each other, which makes leave-one-out exact by masking.
A null token that says nothing lets few labels say little.

Inference is numpy; `train_network` makes the weights, `network.json` is their card.
The weights' digest is checked when they are loaded: a damaged or exchanged file is refused.
Does not know how the log odds that it corrects were made. Sources: prior-fitted networks (Müller et
al. 2022); the relational, residual form is own.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import StoreError

__all__ = ["HEADS", "LAYERS_DEEP", "Network", "WIDTH", "card", "load_network", "tokens"]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]

WIDTH = 48
HEADS = 4
LAYERS_DEEP = 2
N_PROFILE = 5
"""Difficulty and four axes, in units of their spread; absent ones are 0."""
N_QUERY = 2 + N_PROFILE + 2
N_CONTEXT = N_QUERY + 2


def tokens(mean: Array, variance: Array, profile: Array, n_context: int) -> Floats:
    """Return query tokens of shape (rows, N_QUERY) from the closed form's log odds.

    A context token is a query token with (success rate − predicted, log trials) behind it.
    """
    wide = np.zeros((len(mean), N_PROFILE))
    wide[:, : min(profile.shape[1], N_PROFILE)] = profile[:, :N_PROFILE]
    has_pool = float(profile.shape[1] > 1)
    columns = [
        np.clip(mean, -6, 6) / 3,
        np.sqrt(np.clip(variance, 0, 9)),
        *np.clip(wide, -4, 4).T / 2,
        np.full(len(mean), np.log1p(n_context) / 7),
        np.full(len(mean), has_pool),
    ]
    return np.column_stack(columns).astype(np.float32)


def _gelu(x: Floats) -> Floats:
    inner = np.float32(0.7978845608) * (x + np.float32(0.044715) * (x * x * x))
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)))


def _norm(x: NDArray[Any]) -> Floats:
    n = x.shape[-1]
    x = x - np.add.reduce(x, axis=-1, keepdims=True) / n
    square = np.einsum("...i,...i->...", x, x)[..., None] / n
    return np.asarray(x / np.sqrt(square + 1e-5), np.float32)


@dataclass(frozen=True)
class Network:
    """Weights by name; shapes are fixed by the constants above."""

    weights: Mapping[str, Floats]

    def encode(self, context: Floats) -> tuple[tuple[Floats, Floats], ...]:
        """Return keys and values a layer from context tokens: made once a model state."""
        w = self.weights
        hidden = _gelu(context @ w["context_in"] + w["context_in_bias"])
        states = _norm(hidden @ w["context_out"] + w["context_out_bias"])
        size = WIDTH // HEADS
        found = []
        for layer in range(LAYERS_DEEP):
            k, v = (
                (states @ w[f"{layer}.{name}"]).reshape(-1, HEADS, size).transpose(1, 0, 2)
                for name in "kv"
            )
            found.append((np.ascontiguousarray(k.transpose(0, 2, 1)), np.ascontiguousarray(v)))
        return tuple(found)

    def correct(
        self,
        queries: Floats,
        states: Sequence[tuple[Floats, Floats]],
        cosines: Floats,
        *,
        hide_self: bool = False,
    ) -> Array:
        """Return the correction of the log odds of each query.

        `cosines` has shape (queries, context); with `hide_self` row i does not see context i.
        """
        w = self.weights
        x = _gelu(queries @ w["query_in"] + w["query_in_bias"]) @ w["query_out"]
        x = x + w["query_out_bias"]
        size = WIDTH // HEADS
        for layer, (keys, values) in enumerate(states):
            q = (_norm(x) @ w[f"{layer}.q"]).reshape(-1, HEADS, size).transpose(1, 0, 2)
            score = q @ keys / np.float32(np.sqrt(size))
            score += w[f"{layer}.cosine"][:, None, None] * cosines
            if hide_self:
                diagonal = np.arange(len(queries))
                score[:, diagonal, diagonal] = -1e9
            nothing = np.einsum("hqd,hd->hq", q, w[f"{layer}.null"].reshape(HEADS, size))
            nothing = nothing + w[f"{layer}.null_bias"][:, None]
            top = np.maximum(score.max(axis=2, initial=-1e9), nothing)
            score -= top[:, :, None]
            np.exp(score, out=score)
            total = score.sum(axis=2) + np.exp(nothing - top)
            mixed = (score @ values) / total[:, :, None]
            x = x + mixed.transpose(1, 0, 2).reshape(len(queries), WIDTH) @ w[f"{layer}.o"]
            hidden = _gelu(_norm(x) @ w[f"{layer}.up"] + w[f"{layer}.up_bias"])
            x = x + hidden @ w[f"{layer}.down"] + w[f"{layer}.down_bias"]
        return np.asarray(_norm(x) @ w["head"] + w["head_bias"][0], dtype=np.float64)

    def correct_stacked(
        self,
        queries: Floats,
        states: Sequence[tuple[Floats, Floats]],
        cosines: Floats,
        hidden: Floats,
    ) -> Array:
        """Return the correction of one query a model, each against a context of its own.

        `states` holds keys (models, heads, size, rows) and values (models, heads, rows, size) a
        layer; `cosines` and `hidden` have shape (models, rows), −1e9 where there is no row.
        """
        w, m = self.weights, len(queries)
        x = _gelu(queries @ w["query_in"] + w["query_in_bias"]) @ w["query_out"]
        x = x + w["query_out_bias"]
        size = WIDTH // HEADS
        for layer, (keys, values) in enumerate(states):
            q = (_norm(x) @ w[f"{layer}.q"]).reshape(m, HEADS, 1, size)
            score = (q @ keys)[:, :, 0] / np.float32(np.sqrt(size)) + hidden[:, None, :]
            score += w[f"{layer}.cosine"][None, :, None] * cosines[:, None, :]
            null = w[f"{layer}.null"].reshape(HEADS, size)
            nothing = (q[:, :, 0] * null).sum(axis=2) + w[f"{layer}.null_bias"]
            top = np.maximum(score.max(axis=2, initial=-1e9), nothing)
            score = np.exp(score - top[:, :, None])
            total = score.sum(axis=2) + np.exp(nothing - top)
            mixed = (score[:, :, None] @ values)[:, :, 0] / total[:, :, None]
            x = x + mixed.reshape(m, WIDTH) @ w[f"{layer}.o"]
            inner = _gelu(_norm(x) @ w[f"{layer}.up"] + w[f"{layer}.up_bias"])
            x = x + inner @ w[f"{layer}.down"] + w[f"{layer}.down_bias"]
        return np.asarray(_norm(x) @ w["head"] + w["head_bias"][0], dtype=np.float64)


def card() -> dict[str, Any]:
    """Return the training card: data, seed, digest, numbers."""
    text = files("tfgrpo.routing.estimator").joinpath("network.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@cache
def load_network() -> Network:
    """Return the network of the package.

    Raises:
        StoreError: the weights are not those that the card describes.
    """
    raw = files("tfgrpo.routing.estimator").joinpath("network.npz").read_bytes()
    if hashlib.sha256(raw).hexdigest() != card()["sha256"]:
        raise StoreError(
            "network.npz is not the file its card network.json describes: install again, or "
            "run tfgrpo.routing.estimator.train_network"
        )
    with np.load(io.BytesIO(raw), allow_pickle=False) as data:
        return Network({name: data[name].astype(np.float32) for name in data.files})
