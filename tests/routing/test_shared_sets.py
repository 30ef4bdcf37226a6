"""The benchmark's reader reproduces the check values that come with the shared sets."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.benchmarks.routing.routing_data import FOLDER, read_table
from tfgrpo.routing.backtest.backtest import hash_split, leaked

pytestmark = pytest.mark.skipif(
    not (FOLDER / "checks.json").exists(), reason="the shared routing sets are not here"
)


@pytest.mark.parametrize(
    ("name", "prompts", "models", "mean", "split"),
    [
        ("llmrouter", 6108, 7, 0.4120, (3703, 1178, 1227)),
        ("zeroeval", 2840, 60, 0.6869, (1695, 591, 554)),
        ("bfcl", 1460, 71, 0.7383, (863, 295, 302)),
    ],
)
def test_counts_means_and_splits_are_those_of_the_readme(name, prompts, models, mean, split):
    table, rows, infos, _ = read_table(name)
    assert (len(table.keys), len(infos)) == (prompts, models)
    assert table.successes.sum() / table.trials.sum() == pytest.approx(mean, abs=5e-5)
    parts = hash_split([r.get("same_as") or r["id"] for r in rows])
    sizes = [int(np.isin(parts, s).sum()) for s in (range(6), (6, 7), (8, 9))]
    assert tuple(sizes) == split
    train = [p for p, s in zip(table.prompts, parts, strict=True) if s < 6]
    test = [p for p, s in zip(table.prompts, parts, strict=True) if s > 7]
    assert leaked(train, test) == []
    assert json.loads((FOLDER / "checks.json").read_text())


def test_the_two_policies_have_the_stated_mixed_groups():
    table, _, infos, roles = read_table("v0_sample")
    assert roles is not None
    column = next(j for j, m in enumerate(infos) if m["name"] == "Qwen3-4B-Instruct@16")
    context = roles[:, column] == 0
    p = table.rates[context, column]
    assert context.sum() == 512
    assert np.mean(1 - p**4 - (1 - p) ** 4) == pytest.approx(0.3055, abs=1e-4)
    assert np.mean(1 - p**8 - (1 - p) ** 8) == pytest.approx(0.4066, abs=1e-4)
