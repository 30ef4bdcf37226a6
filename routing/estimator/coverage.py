"""When a prompt is far: no nearer to any known prompt than text without meaning is.

A fixed cosine means something else for every embedder and every kind of prompts; nonsense words
measure what "unrelated" is under this one. Where the known prompts themselves lie further apart
than that, a tenth of them may. Does not know outcomes. Source: own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.routing.estimator.prompt_features import PromptFeatures
from tfgrpo.runtime.embedders import Embedder, Floats, JoinedEmbedder, unit_rows

__all__ = ["far_floor", "nonsense", "text_part", "text_width"]

_SAMPLE = 512


def text_width(embedder: Embedder) -> int:
    """Return how many leading columns of a row come from the text alone."""
    if isinstance(embedder, PromptFeatures):
        return text_width(embedder.base)
    return embedder.text_width if isinstance(embedder, JoinedEmbedder) else embedder.width


def text_part(rows: NDArray[Any], width: int) -> Floats:
    """Return the columns that come from the text, as unit rows: lengths and tags are near anyway.

    >>> text_part(np.array([[3.0, 4.0, 9.0]]), 2).round(1).tolist()
    [[0.6000000238418579, 0.800000011920929]]
    """
    return unit_rows(rows[:, :width])


@cache
def nonsense(n: int = 48) -> tuple[str, ...]:
    """Return texts of random letters, a sentence to a page long; always the same."""
    rng = np.random.default_rng(7)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    texts = []
    for i in range(n):
        words = [
            "".join(rng.choice(letters, size=rng.integers(2, 9))) for _ in range(6 + 3 * (i % 16))
        ]
        texts.append(" ".join(words))
    return tuple(texts)


def far_floor(embedder: Embedder, known: NDArray[Any]) -> float:
    """Return the cosine to the nearest known prompt below which a prompt is far.

    `known` holds the unit rows of the known prompts; without any everything is far.
    """
    if not len(known):
        return 1.1
    known = text_part(known, text_width(embedder))
    strange = text_part(embedder.embed(nonsense()), known.shape[1])
    strange = (strange @ known.T).max(axis=1)
    floor = float(np.quantile(strange, 0.9))
    if len(known) > 1:
        sample = known[:: max(len(known) // _SAMPLE, 1)]
        # The largest cosine is the row itself.
        nearest = np.partition(sample @ known.T, -2, axis=1)[:, -2]
        floor = min(floor, float(np.quantile(nearest, 0.1)))
    return floor
