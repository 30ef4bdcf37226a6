"""Which entries a task gets: all of them, or the nearest few by embedding.

An embedder is anything with `embed(texts) -> array`; hashed character n-grams need no library,
sentence-transformers is an extra. Search is exact; from 10,000 entries FAISS takes over where it
is installed. Pinned entries always come along. Whether choosing helps is for the gate to say.
Does not know prompts. Source: hashed n-grams (Weinberger et al., feature hashing); top-k cosine.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError, MissingExtraError
from tfgrpo.experience.entry import Kind
from tfgrpo.experience.library import Library
from tfgrpo.experience.similarity import words
from tfgrpo.rollout import Task

Vectors = NDArray[np.float32]
_FAISS_FROM = 10_000


class Embedder(Protocol):
    """Turns texts into vectors.

    Contract: one row a text, in order; rows of length 1 (or 0 for an empty text); equal texts
    give equal rows.
    """

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return an array of shape (len(texts), dimensions)."""
        ...


@dataclass(frozen=True, slots=True)
class HashedNgrams:
    """Words, word pairs and character trigrams, hashed with signs into a vector."""

    dimensions: int = 1024

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return unit rows."""
        rows = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        for i, text in enumerate(texts):
            for feature, weight in _features(text):
                code = int.from_bytes(
                    hashlib.blake2b(feature.encode("utf-8", "replace"), digest_size=8).digest()
                )
                rows[i, (code >> 1) % self.dimensions] += weight if code & 1 else -weight
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        unit = rows / np.where(lengths > 0, lengths, 1)
        return unit.astype(np.float32)


def _features(text: str) -> list[tuple[str, float]]:
    found = words(text)
    features = [(f"w:{w}", 1.0) for w in found]
    features += [(f"p:{a} {b}", 1.0) for a, b in pairwise(found)]
    for word in found:
        padded = f"^{word}$"
        features += [(f"c:{padded[k : k + 3]}", 0.3) for k in range(len(padded) - 2)]
    return features


class SentenceEmbedder:
    """A sentence-transformers model.

    Args:
        model: name or path.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
    """

    def __init__(self, model: str) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as exc:
            raise MissingExtraError.of(
                "embed", "choosing by sentence embedding", "sentence_transformers"
            ) from exc
        self._model: Any = SentenceTransformer(model)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return unit rows."""
        rows: Vectors = self._model.encode(
            list(texts), normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        )
        return rows.astype(np.float32)


@dataclass
class TopK:
    """Chooses the k entries whose cue is nearest to the task.

    Each entry is embedded once, however many tasks are asked for. The nearest stands last, next
    to the task. Entries of one kind only where `kind` says so; the others then all come along.
    """

    k: int
    embedder: Embedder = field(default_factory=HashedNgrams)
    kind: Kind | None = None
    max_cached: int = 100_000
    _cache: OrderedDict[str, Vectors] = field(default_factory=OrderedDict, repr=False)

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"top k is {self.k!r}; it must be at least 1")

    def select(self, library: Library, task: Task) -> Sequence[str]:
        """Return the ids for a task."""
        shown = library.shown
        free = [e for e in shown if e.status != "pinned" and self.kind in (None, e.kind)]
        free = [e for e in free if not (e.kind == "exemplar" and _is_from(e, task))]
        always = [
            e.experience_id
            for e in shown
            if e.status == "pinned" or self.kind not in (None, e.kind)
        ]
        if not free:
            return always
        rows = self._rows([e.cue for e in free])
        query = self._rows([task.text])[0]
        nearest = nearest_rows(rows, query, self.k)
        return [*always, *(free[i].experience_id for i in reversed(nearest))]

    def _rows(self, texts: Sequence[str]) -> Vectors:
        fresh = [t for t in dict.fromkeys(texts) if t not in self._cache]
        if fresh:
            for text, row in zip(fresh, self.embedder.embed(fresh), strict=True):
                self._cache[text] = row
        rows = np.stack([self._cache[t] for t in texts])
        while len(self._cache) > self.max_cached:
            self._cache.popitem(last=False)
        return rows


def _is_from(entry: Any, task: Task) -> bool:
    return task.task_id in entry.provenance.task_ids


def nearest_rows(rows: Vectors, query: Vectors, k: int) -> list[int]:
    """Return the indices of the k rows nearest to `query` by cosine, nearest first.

    Exact: numpy below 10,000 rows, FAISS's flat index above where it is installed. Equal
    similarities keep the order of the rows.
    """
    k = min(k, len(rows))
    if len(rows) >= _FAISS_FROM:
        try:
            import faiss
        except ImportError:
            pass
        else:
            index = faiss.IndexFlatIP(rows.shape[1])
            index.add(np.ascontiguousarray(rows))
            _, found = index.search(np.ascontiguousarray(query[None, :]), k)
            return [int(i) for i in found[0]]
    return [int(i) for i in np.argsort(-(rows @ query), kind="stable")[:k]]
