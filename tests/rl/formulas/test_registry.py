"""Provenance: every entry has a source, a formula, a certainty and a test that calls it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.benchmarks.rl.rl_registry import REGISTRIES, claimed_test, figures, functions_of
from tests.rl.formulas.table import DOCUMENT, rendered
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.formulas.registry import Entry, check_needs, lookup, merged, register, required

ROOT = Path(__file__).parents[3]
ENTRIES = [
    pytest.param(entry, id=f"{kind}-{name}")
    for kind, registry in REGISTRIES.items()
    for name, entry in registry.items()
]
WANTED = {
    "losses": "clip dapo dual_clip gspo cispo sapo gmpo dispo etr gbpo llds kl_cov clip_cov "
    "reinforce opmd asymre topr p3o luspo rover rec_one_side rec_two_side rec_ring",
    "aggregations": "token_mean row_mean row_sum fixed_length token_sum",
    "advantages": "grpo dr_grpo rloo reinforce_pp batch_std bnpo ngrpo mc_grpo gdpo dgpo "
    "seed_linear unlikeliness_grpo riskpo opo maxrl pass_at_k arena_rank nudge r3l vcpo",
    "rewards": "length_in_group overlong_soft tool_cost weighted_sum unlikeliness fapo ares",
    "credit": "gigpo hgpo salt igpo spo_chain spo_tree gtpo_trajectory dcpo_distribution",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_has_a_source_a_formula_and_a_test_that_calls_it(entry: Entry) -> None:
    assert entry.source.strip() and entry.formula.strip()
    claimed = claimed_test(ROOT, entry)
    assert claimed is not None, f"{entry.name}: {entry.test} does not exist"
    names = {n.id for n in ast.walk(claimed) if isinstance(n, ast.Name)}
    assert entry.fn.__name__ in names or "AGGREGATIONS" in names | _names_called(entry, names)
    assert any(isinstance(n, ast.Assert) for n in ast.walk(claimed))


def _names_called(entry: Entry, names: set[str]) -> set[str]:
    """Names that the test's own helpers use: one level down."""
    path, _, _ = entry.test.partition("::")
    return {
        node.id
        for name, function in functions_of(ROOT / path).items()
        if name in names
        for node in ast.walk(function)
        if isinstance(node, ast.Name)
    }


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_says_what_it_was_checked_against(entry: Entry) -> None:
    """A formula said to be read in code names the file, or says what was not to be had."""
    assert entry.checked
    if entry.is_approximation:
        assert "read in" not in entry.checked and "run beside" not in entry.checked
    if "read in" in entry.checked:
        assert "/" in entry.checked.partition("read in")[2]


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_approximation_says_so_in_its_docstring_and_nothing_else_does(entry: Entry) -> None:
    text = entry.fn.__doc__ or ""
    assert text.strip(), f"{entry.name} has no docstring"
    assert ("pproximation" in text) == entry.is_approximation


@pytest.mark.parametrize("kind", sorted(WANTED))
def test_the_promised_names_are_registered(kind: str) -> None:
    assert set(WANTED[kind].split()) <= set(REGISTRIES[kind])


def test_a_name_means_one_thing_across_all_registries() -> None:
    names = Counter(name for registry in REGISTRIES.values() for name in registry)
    assert [name for name, n in names.items() if n > 1] == []
    assert "bnpo" in REGISTRIES["advantages"]  # the paper's; TRL's word for a token normaliser
    clashing = {"gtpo", "hrpo", "aepo", "sage", "spo", "capo", "dcpo", "npo", "tgpo", "vpo", "r3"}
    assert clashing & set(names) == set()


def test_the_page_lists_exactly_what_is_registered() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == rendered(), (
        "write the page again: python -m tests.rl.formulas.table"
    )


def test_the_bar_is_met() -> None:
    found = figures(ROOT)
    assert found["entries"] >= 45
    assert found["closed_form_tested"] == found["entries"]
    assert 0 < found["approximations"] < found["entries"] / 2


def entry_with(**changes: object) -> dict[str, Entry]:
    registry: dict[str, Entry] = {}
    texts = {"source": "s", "formula": "f", "certainty": "code", "test": "p.py::t", **changes}
    register(registry, "one", **texts)(lambda batch: batch)  # type: ignore[arg-type]
    return registry


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": " "}, "no source"),
        ({"formula": ""}, "no formula"),
        ({"test": ""}, "no test"),
        ({"test": "somewhere"}, "path::test_name"),
        ({"certainty": "sure"}, "certainty 'sure'"),
        ({"needs": ("magic",)}, "needs"),
    ],
)
def test_an_entry_without_provenance_is_refused(changes: dict[str, object], message: str) -> None:
    assert list(entry_with()) == ["one"]
    with pytest.raises(ValueError, match=message):
        entry_with(**changes)


def test_a_name_cannot_be_taken_twice() -> None:
    registry = entry_with()
    with pytest.raises(ValueError, match="registered twice"):
        register(registry, "one", source="s", formula="f", certainty="code", test="p.py::t")
    with pytest.raises(ValueError, match="registered twice"):
        merged(registry, registry)


def test_a_wrong_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no loss 'cilp'; did you mean 'clip'\?"):
        lookup(REGISTRIES["losses"], "loss", "cilp")


def test_what_a_caller_cannot_supply_is_refused_before_anything_is_sampled() -> None:
    check_needs(LOSSES["reinforce"], "loss", ())
    check_needs(LOSSES["p3o"], "loss", LOSSES["p3o"].needs)
    with pytest.raises(
        ConfigError, match=r"loss 'p3o' needs group, every_row, ratio, rewards.* choose another"
    ):
        check_needs(LOSSES["p3o"], "loss", ("sequence",))


def test_a_missing_input_is_named() -> None:
    assert required(3, "x", "y") == 3
    with pytest.raises(ConfigError, match="'seed' needs answer_R, which was not given; set it"):
        required(None, "seed", "answer_R", "set it")
