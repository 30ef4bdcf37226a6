"""Estimates behind a text that all prompts share, and where a document buries the question.

    python -m tests.benchmarks.routing.routing_texts

AUC and Brier score within a model, mean over the 7 models of `llmrouter`, 256 labels each, hashed
vectors, no reference models. The prefix is 2,400 characters; a document of 20,000 characters of
other prompts stands around the question in the last rows. `stripped` is what a fitted router does:
it leaves out what all known prompts share.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.record import record
from tests.benchmarks.routing.routing_data import load
from tfgrpo.routing.backtest.metrics import area, brier
from tfgrpo.routing.estimator.prompt_features import PromptFeatures, shared_ends
from tfgrpo.routing.estimator.value_model import Layer, ValueModel
from tfgrpo.routing.records import OutcomeTable
from tfgrpo.runtime.embedders import Embedder, HashedNgrams

LABELS = 256
LAYERS: tuple[Layer, ...] = ("level", "local", "network", "ridge", "near")
POLICY = "You answer for a company. Be brief, be kind and never speak of prices or of others. "
PREFIX = (POLICY * 40)[:2400]


def measure(
    table: OutcomeTable,
    encoder: Embedder,
    texts: list[str],
    asked: list[str],
    split: NDArray[np.intp],
) -> dict[str, float]:
    """Mean AUC and Brier over the models; labels on `texts`, questions as in `asked`."""
    train, test = np.flatnonzero(split < 6), np.flatnonzero(split >= 8)
    queries = encoder.embed([asked[i] for i in test])
    areas, losses = [], []
    for j in range(len(table.models)):
        rows = np.sort(np.random.default_rng(j).permutation(train)[:LABELS])
        state = ValueModel(encoder, layers=LAYERS).state_of_counts(
            encoder.embed([texts[i] for i in rows]),
            table.successes[rows, j],
            table.trials[rows, j],
        )
        mean = state.predict_vectors(queries).mean
        areas.append(area(mean, table.rates[test, j]))
        losses.append(brier(mean, table.rates[test, j]))
    return {"auc": round(float(np.mean(areas)), 4), "brier": round(float(np.mean(losses)), 4)}


def main() -> None:
    """Measure and record."""
    began = time.process_time()
    data = load("llmrouter")
    table, split = data.table, data.split
    plain = list(table.prompts)
    framed = [PREFIX + p for p in plain]
    document = " ".join(plain[:400])[:20_000]
    buried = [f"{p}\n{document}" for p in plain]
    hashed = HashedNgrams()
    stripping = PromptFeatures(hashed, shared=shared_ends(framed), weights=(0.0, 0.0))
    rows = {
        "plain": measure(table, hashed, plain, plain, split),
        "prefix": measure(table, hashed, framed, framed, split),
        "prefix_stripped": measure(table, stripping, framed, framed, split),
        "document_after": measure(table, hashed, plain, buried, split),
        "document_after_question_alone": measure(table, hashed, plain, plain, split),
    }
    figures = {
        **rows,
        "prefix_loss_auc": round(rows["plain"]["auc"] - rows["prefix"]["auc"], 4),
        "prefix_stripped_loss_auc": round(rows["plain"]["auc"] - rows["prefix_stripped"]["auc"], 4),
        "labels": LABELS,
        "cpu_s": round(time.process_time() - began, 1),
    }
    record("routing_texts", figures, "python -m tests.benchmarks.routing.routing_texts")


if __name__ == "__main__":
    main()
