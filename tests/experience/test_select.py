from __future__ import annotations

import numpy as np
import pytest

from tfgrpo.errors import ConfigError
from tfgrpo.experience.edits import Edit
from tfgrpo.experience.entry import Provenance
from tfgrpo.experience.library import Library, from_texts
from tfgrpo.experience.select import TopK, nearest_rows
from tfgrpo.messages import Message
from tfgrpo.rollout import Task
from tfgrpo.runtime.embedders import HashedNgrams

TEXTS = [
    "For dates, write the year first.",
    "For order numbers, copy every digit.",
    "For sums of money, keep the currency.",
    "For ships, count the masts.",
]


def test_the_nearest_entries_are_chosen_and_the_nearest_stands_last() -> None:
    library = from_texts(TEXTS)
    ids = TopK(2).select(library, Task("t", "Which date and year does the message name?"))
    assert len(ids) == 2 and ids[-1] == "E1"


def test_pinned_entries_always_come_along_and_hidden_ones_never() -> None:
    library = from_texts(TEXTS).with_status("E4", "pinned").with_status("E1", "banned")
    context = library.context(Task("t", "Which date and year?"), TopK(1))
    sources = [p.source for p in context.parts]
    assert sources[0] == "E4" and "E1" not in sources and len(sources) == 2


def test_no_task_is_given_the_exemplar_made_from_itself() -> None:
    def example(i: int) -> Edit:
        turns = (Message("user", f"date {i}"), Message("assistant", "x"))
        return Edit("add", kind="exemplar", turns=turns, provenance=Provenance((), (), (f"t{i}",)))

    library = Library().apply([example(1), example(2), example(3)]).library
    assert "E1" not in TopK(3).select(library, Task("t1", "date 1"))
    assert TopK(1).select(library, Task("t9", "date 2")) == ["E2"]


def test_exact_search_equals_a_brute_force_loop() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(500, 16)).astype(np.float32)
    query = rng.normal(size=16).astype(np.float32)
    brute = sorted(
        range(500), key=lambda i: -sum(a * b for a, b in zip(rows[i], query, strict=True))
    )
    assert nearest_rows(rows, query, 7) == brute[:7]


def test_faiss_agrees_with_numpy_above_ten_thousand_rows() -> None:
    pytest.importorskip("faiss", reason="the extra embed is not installed")
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(10_050, 8)).astype(np.float32)
    query = rng.normal(size=8).astype(np.float32)
    exact = [int(i) for i in np.argsort(-(rows @ query), kind="stable")[:5]]
    assert nearest_rows(rows, query, 5) == exact


def test_each_entry_is_embedded_once_however_many_tasks_there_are() -> None:
    class Counting:
        texts = 0

        def embed(self, texts: list[str]) -> np.ndarray:
            self.texts += len(texts)
            return HashedNgrams().embed(texts)

    embedder = Counting()
    chosen = TopK(2, embedder)  # type: ignore[arg-type]
    library = from_texts(TEXTS)
    for i in range(10):
        chosen.select(library, Task(f"t{i}", f"task {i}"))
    assert embedder.texts == len(TEXTS) + 10


def test_rows_have_length_one_and_do_not_depend_on_the_process() -> None:
    rows = HashedNgrams(64).embed(["alpha beta", "", "数量"])
    assert np.allclose(np.linalg.norm(rows, axis=1), [1, 0, 1])
    assert float(rows[0] @ HashedNgrams(64).embed(["alpha beta"])[0]) == pytest.approx(1)


def test_k_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        TopK(0)
