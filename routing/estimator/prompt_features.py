"""What else is known of a prompt beside its text: lengths and tags, without what all prompts share.

Does not know models, outcomes or which layer reads the rows. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tfgrpo.runtime.canonical import digest
from tfgrpo.runtime.embedders import (
    LENGTH_WEIGHT,
    Embedder,
    Floats,
    length_rows,
    prepare_embedder,
    unit_rows,
)

__all__ = ["PromptFeatures", "embed_prompts", "prepare", "shared_ends"]

TAG_WEIGHT = 0.5
"""Of the tags against the text's row of length 1."""


class PromptFeatures:
    """An embedder, and beside its rows what else is known of a prompt: lengths and tags.

    What all known prompts share at the start and at the end is left out before embedding. Lengths
    (characters, words, digits, lines) take one part of the row, one column a known tag another; a
    prompt without tags gets the mean of the known ones. Rows are of length 1 again.
    """

    def __init__(
        self,
        base: Embedder,
        *,
        tags: Mapping[str, float] | None = None,
        shared: tuple[str, str] = ("", ""),
        weights: tuple[float, float] = (LENGTH_WEIGHT, TAG_WEIGHT),
    ) -> None:
        """Join an embedder with features.

        Args:
            base: makes the rows of the texts.
            tags: known tags and the share of the known prompts that bear each.
            shared: what the known prompts begin and end with.
            weights: of lengths and of tags against the text's row of length 1.
        """
        self.base, self.tags, self.shared, self.weights = base, dict(tags or {}), shared, weights
        self._column = {tag: i for i, tag in enumerate(self.tags)}

    @property
    def embedder_id(self) -> str:
        """The base's id and a digest of the features."""
        made_of = [self.tags, list(self.shared), list(self.weights)]
        return f"{self.base.embedder_id}-with-{digest(made_of, 12)}"

    @property
    def width(self) -> int:
        """The base's width, four lengths and a column a tag."""
        return self.base.width + 4 + len(self.tags)

    def bare(self, text: str) -> str:
        """Return a text without what the known prompts share; a text that is no more stays."""
        start, end = self.shared
        if start and text.startswith(start):
            text = text[len(start) :] or text
        if end and text.endswith(end):
            text = text[: -len(end)] or text
        return text

    def share_read(self, text: str) -> float:
        """See `Embedder`; the shared start and end count as read."""
        bare = self.bare(text)
        left = (1 - self.base.share_read(bare)) * len(bare)
        return 1.0 - left / max(len(text), 1)

    def embed(self, texts: Sequence[str], tags: Sequence[Sequence[str]] | None = None) -> Floats:
        """Return one row a text; `tags` holds the tags of each."""
        bare = [self.bare(t) for t in texts]
        parts = [self.base.embed(bare)]
        if self.weights[0]:
            parts.append(self.weights[0] * length_rows(bare))
        else:
            parts.append(np.zeros((len(texts), 4), np.float32))
        if self.tags:
            parts.append(self.weights[1] * self._hot(len(texts), tags))
        return unit_rows(np.hstack(parts))

    def _hot(self, n: int, tags: Sequence[Sequence[str]] | None) -> Floats:
        mean = np.array(list(self.tags.values()), np.float32)
        rows = np.tile(mean, (n, 1))
        for i, own in enumerate(tags or ()):
            known = [self._column[t] for t in own if t in self._column]
            if known:
                rows[i] = 0.0
                rows[i, known] = 1.0
        return rows


def shared_ends(texts: Sequence[str], *, least: int = 200) -> tuple[str, str]:
    """Return what all texts begin and end with, each "" below `least` characters.

    What every prompt says tells none of them apart, and drowns what does.
    """
    if len(set(texts)) < 2:
        return "", ""
    turned = [t[::-1] for t in texts]
    start = _common(min(texts), max(texts))
    end = _common(min(turned), max(turned))[::-1]
    return start if len(start) >= least else "", end if len(end) >= least else ""


def _common(a: str, b: str) -> str:
    """What two texts begin with; of the first and the last of many, what all begin with."""
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def embed_prompts(
    embedder: Embedder, texts: Sequence[str], tags: Sequence[Sequence[str]]
) -> Floats:
    """Return rows of prompts, with their tags where the embedder has a use for them."""
    if isinstance(embedder, PromptFeatures):
        return embedder.embed(texts, tags)
    return embedder.embed(texts)


def prepare(embedder: Embedder) -> None:
    """Load what an embedder would load at its first text."""
    prepare_embedder(embedder.base if isinstance(embedder, PromptFeatures) else embedder)
