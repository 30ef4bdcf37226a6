"""Which entries a task gets: all of them, or the nearest few by embedding.

An embedder is anything with `embed(texts) -> array` (`runtime.embedders`). Search is exact; from
10,000 entries FAISS takes over where it is installed. Pinned entries always come along. Whether
choosing helps is for the gate to say.
Does not know prompts. Source: hashed n-grams (Weinberger et al., feature hashing); top-k cosine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfgrpo.errors import ConfigError
from tfgrpo.experience.entry import Kind
from tfgrpo.experience.library import Library
from tfgrpo.rollout import Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tfgrpo.runtime.embedders import Embedder

    Vectors = NDArray[np.float32]

_FAISS_FROM = 10_000


def _hashed() -> Embedder:
    from tfgrpo.runtime.embedders import HashedNgrams

    return HashedNgrams(1024)


@dataclass
class TopK:
    """Chooses the k entries whose cue is nearest to the task.

    Each entry is embedded once, however many tasks are asked for. The nearest stands last, next
    to the task. Entries of one kind only where `kind` says so; the others then all come along.
    """

    k: int
    embedder: Embedder = field(default_factory=_hashed)
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
        import numpy as np

        fresh = [t for t in dict.fromkeys(texts) if t not in self._cache]
        if fresh:
            for text, row in zip(fresh, self.embedder.embed(fresh), strict=True):
                self._cache[text] = row
        rows = np.stack([self._cache[t] for t in texts])
        while len(self._cache) > self.max_cached:
            self._cache.popitem(last=False)
        return rows


def embedder_of(name: str) -> Embedder:
    """Return the embedder of `learn.embedder`: `hashed`, a spec of `open_embedder`, or the bare
    name of a sentence-transformers model."""
    from tfgrpo.runtime.embedders import open_embedder

    if name == "hashed":
        return _hashed()
    known = name.partition(":")[0] in ("hashed", "minilm", "sentence")
    return open_embedder(name if known else f"sentence:{name}")


def _is_from(entry: Any, task: Task) -> bool:
    return task.task_id in entry.provenance.task_ids


def nearest_rows(rows: Vectors, query: Vectors, k: int) -> list[int]:
    """Return the indices of the k rows nearest to `query` by cosine, nearest first.

    Exact: numpy below 10,000 rows, FAISS's flat index above where it is installed. Equal
    similarities keep the order of the rows.
    """
    import numpy as np

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
