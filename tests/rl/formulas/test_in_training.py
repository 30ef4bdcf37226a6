"""What a formula means reaches training: order of parts, aggregation, state, dead settings."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.benchmarks.rl.rl_registry import REGISTRIES
from tests.rl.formulas.batches import rewards, tokens
from tests.rl.tiny import EvenTokens, random_rows, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.inputs import RatioFacts
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.formulas.registry import Entry
from tfgrpo.rl.formulas.requirements import aggregation_of, remarks
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rl.update.accumulate import TrainRow, token_weights
from tfgrpo.rl.update.row_features import RowFeatures, batch_of
from tfgrpo.rollout import Rollout, Score, Task


class Stages(EvenTokens):
    """Parts parse, facts, quality in that order; which are met depends on the sample."""

    MET = ({"parse": 1, "facts": 0}, {"parse": 0, "facts": 1}, {"parse": 1, "facts": 1}, {})

    async def score(self, rollout: Rollout, task: Task) -> Score:
        met = self.MET[rollout.sample_index % 4]
        parts = {name: float(met.get(name, 0)) for name in ("parse", "facts", "quality")}
        return Score(0.0, parts=parts)


def test_stages_open_in_the_order_that_the_verifier_gives_them(tmp_path: Path) -> None:
    """{parse 1, facts 0} earns its first stage; a reply that cannot be parsed earns no facts."""
    config = tiny_config(
        tmp_path, rewards={"names": ["staged"]}, verifier={"kind": "function", "function": "a:b"}
    )
    trainer = Trainer(config, tiny_parts(), tiny_tasks(), Stages())
    groups = trainer._roller.roll(0).groups
    rows, _ = trainer._row_maker.rows(groups, 0)
    order = [r.sample_index for g in groups for r in g.graded]
    assert [row.reward for row in rows] == [(1.0, 0.0, 2.0, 0.0)[i] for i in order]


@pytest.mark.parametrize(
    "given",
    [
        [["parse", "facts", "quality"]] * 2,
        [["parse"], ["parse", "facts", "quality"]],
        [["parse", "quality"], ["parse", "facts", "quality"]],
        [["parse", "facts"], ["parse"], ["parse", "facts", "quality"], []],
    ],
)
def test_parts_keep_their_order_where_a_verifier_stops_early(given: list[list[str]]) -> None:
    rows = [RowFeatures(0.0, 0, 1, dict.fromkeys(names, 1.0)) for names in given]
    assert batch_of([(rows, 1)]).part_names == ("parse", "facts", "quality")


@pytest.mark.parametrize(
    ("loss", "ratio"),
    [
        ("luspo", 2.0),
        ("gspo", 1.0),
        ("gspo_token", 1.0),
        ("gmpo", 1.0),
        ("clip", 2.0),
        ("dapo", 2.0),
        ("sppo_square", 2.0),
    ],
)
def test_a_loss_brings_its_own_aggregation_unless_one_is_set(
    tmp_path: Path, loss: str, ratio: float
) -> None:
    """Rows of 2 and 4 tokens with equal advantages, on-policy: their weights are as 1 : ratio."""
    config = tiny_config(tmp_path, loss={"name": loss}, optimiser={"epochs_per_batch": 2})
    settings = Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens()).updater.settings
    rows = random_rows(1, 2)
    rows = [TrainRow(type(r)(r.index, r.prompt_ids, (5,) * n), 1.0) for r, n in zip(rows, (2, 4))]
    weight_R = token_weights(rows, settings)
    batch = tokens([[0.0] * 2, [0.0] * 4], [1.0, 1.0])
    (slope_D,) = torch.autograd.grad(LOSSES[loss].fn(batch).sum(), batch.logp_D)
    felt = slope_D.numpy() * np.repeat(weight_R, [2, 4])
    # a row's whole pull, and for gspo and its like the row's value
    assert felt[2:].sum() / felt[:2].sum() == pytest.approx(ratio)
    plain = tiny_config(tmp_path, loss={"name": loss, "aggregation": "token_sum"})
    assert aggregation_of(plain.formulas) == "token_sum"


RATIO = sorted(
    n
    for n, e in LOSSES.items()
    if "ratio" in e.needs and not {"behaviour", "own_start"} & set(e.needs)
)


def on_policy_slope(name: str) -> list[float]:
    """∂ loss / ∂ log π of each token at ratio 1, two rows of equal length and advantages ±1."""
    batch = tokens(
        [[0.0, 0.0], [0.0, 0.0]],
        [1.0, -1.0],
        entropy_D=torch.ones(4, dtype=torch.float64),
        group_R=torch.tensor([0, 0]),
        reward_R=torch.tensor([1.0, -1.0], dtype=torch.float64),
        columns={"heat": torch.zeros(4, dtype=torch.float64)},
    )
    options = {"next_gap_D": torch.zeros(4)} if "next_gap" in LOSSES[name].needs else {}
    (slope_D,) = torch.autograd.grad(LOSSES[name].fn(batch, **options).sum(), batch.logp_D)
    return slope_D.tolist()


@pytest.mark.parametrize("name", sorted(set(RATIO) - {"clip_cov"}))
def test_a_loss_with_a_ratio_is_reinforce_under_one_update_and_the_run_says_so(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slope = on_policy_slope(name)
    assert np.abs(slope) == pytest.approx([abs(slope[0])] * 4) and slope[0] < 0 < slope[2]
    config = tiny_config(tmp_path, loss={"name": name})
    with caplog.at_level(logging.WARNING, "tfgrpo.rl"):
        Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens())
    told = [r.getMessage() for r in caplog.records if "ratio of trained" in r.getMessage()]
    assert len(told) == 1 and "\n" not in told[0] and repr(name) in told[0]


@pytest.mark.parametrize(
    "sections",
    [
        {"loss": {"name": "reinforce"}},
        {"loss": {"name": "etr"}, "optimiser": {"epochs_per_batch": 2}},
        {"loss": {"name": "etr"}, "optimiser": {"updates_per_epoch": 2}},
        {"loss": {"name": "etr"}, "curriculum": {"replay": 1}},
        {"loss": {"name": "decoupled_clip"}},
        {"loss": {"name": "inpo"}},
    ],
)
def test_no_remark_where_a_ratio_moves_or_none_is_there(
    sections: dict[str, Any], tmp_path: Path
) -> None:
    assert remarks(tiny_config(tmp_path, **sections).formulas) == []


def test_entries_of_which_a_run_has_a_part_say_what_is_missing(tmp_path: Path) -> None:
    nudge = {"loss": {"advantage": "nudge"}, "hints": {"name": "sage"}}
    (told,) = remarks(tiny_config(tmp_path, **nudge).formulas)
    assert "NudgeRL's advantage alone" in told
    steps = {"environment": "a:B", "max_tokens": 50}
    (told,) = remarks(tiny_config(tmp_path, credit={"name": "a2tgpo"}, multi_turn=steps).formulas)
    assert "the verifier's reward has no effect" in told
    assert remarks(tiny_config(tmp_path).formulas) == []


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"loss": {"name": "rpo", "advantage": "rloo"}}, "loss.advantage has no effect"),
        (
            {"loss": {"name": "inpo"}, "credit": {"name": "top_entropy"}},
            "credit.name 'top_entropy'",
        ),
    ],
)
def test_an_advantage_that_a_loss_by_rewards_ignores_is_told(
    sections: dict[str, Any], what: str, tmp_path: Path
) -> None:
    (told,) = remarks(tiny_config(tmp_path, **sections).formulas)
    assert what in told and "goes by rewards" in told
    assert remarks(tiny_config(tmp_path, loss={"name": "rpo"}).formulas) == []


def test_a_loss_on_groups_refuses_groups_of_one(tmp_path: Path) -> None:
    loss = {"name": "rpo", "advantage": "dr_grpo"}
    with pytest.raises(ConfigError, match="loss 'rpo' compares the rollouts of a group"):
        tiny_config(tmp_path, loss=loss, rollout={"group_size": 1})


def test_an_outlier_that_no_group_can_have_is_refused(tmp_path: Path) -> None:
    """Of G lengths none lies √(G − 1) population deviations above the mean: 1.73 for 4."""
    with pytest.raises(ConfigError, match=r"k = 2 and rollout.group_size 4: .* the most is 1.73"):
        tiny_config(tmp_path, rewards={"names": ["length_outlier"]})
    lower = {"names": ["length_outlier"], "options": {"length_outlier": {"k": 1.0}}}
    assert tiny_config(tmp_path, rewards=lower).rewards.names == ("length_outlier",)


@pytest.mark.parametrize(
    ("value", "message"), [("mean", "is 'mean'; give a number"), (1.0, "is 1.0; give a word")]
)
def test_options_are_words_or_numbers_as_declared(tmp_path: Path, value: Any, message: str) -> None:
    options = {"lr": value} if isinstance(value, str) else {"credit": value}
    with pytest.raises(ConfigError, match=message):
        tiny_config(tmp_path, loss={"advantage": "riskpo", "advantage_options": options})


def states(trainer: Trainer, steps: int) -> list[dict[str, float]]:
    """The formulas' state after each step, as logged."""
    found = []
    for _ in range(steps):
        figures = trainer.step().figures
        found.append({k: v for k, v in figures.items() if k.startswith("state_")})
    return found


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        (
            {"loss": {"advantage": "riskpo", "advantage_options": {"bundle": 1}}},
            {"state_riskpo_q_low", "state_riskpo_q_high"},
        ),
        (
            {
                "loss": {"name": "r2vpo", "options": {"lr": 10.0}},
                "optimiser": {"epochs_per_batch": 2},
            },
            {"state_r2vpo_eta"},
        ),
        ({"loss": {"advantage": "vcpo"}}, {"state_vcpo_lr_scale"}),
    ],
)
def test_a_formulas_state_moves_is_logged_and_survives_a_resume(
    tmp_path: Path, sections: dict[str, Any], names: set[str]
) -> None:
    def made(folder: str) -> Trainer:
        config = tiny_config(tmp_path / folder, **sections)
        return Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens())

    whole = states(made("whole"), 4)
    assert all(set(s) == names for s in whole)
    assert whole[0] != whole[-1], "the state never moved"
    cut = made("cut")
    states(cut, 2)
    cut.save()
    again = made("cut")
    assert again.resume()
    assert states(again, 2) == whole[2:]


def test_a_step_size_that_a_formula_asks_for_shortens_the_step(tmp_path: Path) -> None:
    """Half the scale, half the way; a scale of 1 changes no bit."""

    def moved(scale: float | None) -> torch.Tensor:
        config = tiny_config(tmp_path, optimiser={"max_norm": 0.0})
        trainer = Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens())
        if scale is not None:
            trainer._state.load_state_dict({"vcpo": {"lr_scale": scale}})
        before = trainer._model.decoder.head_weight.detach().clone()
        trainer.step()
        return trainer._model.decoder.head_weight.detach() - before

    plain = moved(None)
    assert torch.equal(moved(1.0), plain)
    assert torch.allclose(moved(0.5), plain / 2, atol=1e-6)


def test_the_weight_of_kl_falls_in_a_line_and_at_zero_no_reference_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1 to 0 over 10 steps: step 5 uses .05, and the pass over the start ends with the weight."""
    config = tiny_config(tmp_path, loss={"kl": 0.1, "kl_end": 0.0}, optimiser={"steps": 10})
    updater = Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens()).updater
    scored: list[Any] = []
    plain = updater.score
    monkeypatch.setattr(updater, "score", lambda *a, **k: scored.append(a) or plain(*a, **k))
    rows = [TrainRow(r, 1.0 if r.index % 2 else -1.0, group=0) for r in random_rows(1, 4)]
    seen = {}
    for number in (0, 5, 10):
        scored.clear()
        updater.update(rows, number)
        seen[number] = updater.settings.kl, len(scored)
    assert seen == {0: (0.1, 1), 5: (pytest.approx(0.05), 1), 10: (pytest.approx(0.0), 0)}


def test_a_loss_is_given_the_runs_longest_reply_unless_one_is_set(tmp_path: Path) -> None:
    def longest(**options: float) -> Any:
        loss = {"name": "drpo", "options": options}
        config = tiny_config(tmp_path, loss=loss, rollout={"max_tokens": 7})
        trainer = Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens())
        return trainer.updater.settings.options["max_tokens"]

    assert longest() == 7
    assert longest(max_tokens=90.0) == 90


def test_an_entropy_bonus_above_its_target_changes_no_bit(tmp_path: Path) -> None:
    """The first batch is under any target, since nothing was seen yet; later ones are over 1e-9."""

    def weights(**loss: Any) -> list[torch.Tensor]:
        config = tiny_config(tmp_path, loss=loss)
        trainer = Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens())
        trainer._state.mean_entropy = 1.0
        for _ in range(2):
            trainer.step()
        return [p.detach().clone() for p in trainer._model.decoder.parameters()]

    plain = weights()
    gated = weights(entropy=0.1, entropy_target=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(plain, gated, strict=True))
    felt = weights(entropy=0.1, entropy_target=99.0)
    assert any(not torch.equal(a, b) for a, b in zip(plain, felt, strict=True))


def alternatives(default: Any) -> list[Any]:
    """Other values of an option."""
    if isinstance(default, str):
        return ["std", "share", "batch", "mix", "row", "turn", "log", "all"]
    if default is None:
        return [0.5, 2.0]
    return [x for x in (0.0, 0.25, 0.5 * default, 1.0, 1.5 * default, 2.0, 3.0) if x != default]


COUNTS = (
    *("tool_calls_R", "invalid_R", "metric_R", "score_R", "statistic_R"),
    *("class_R", "round_R", "flawed_R", "trigger_count_R", "target_R", "overlap_R"),
)


def random_batches(kind: str, seed: int) -> Iterator[Any]:
    """Batches with every optional field, of rows of several lengths and steps."""
    draw = np.random.default_rng(seed)
    for spread in (0.1, 0.5, 2.0):
        lengths = draw.integers(3, 9, size=8).tolist()
        n = sum(lengths)
        if kind == "losses":
            gaps = [draw.normal(0, spread, size=k).tolist() for k in lengths]
            yield tokens(
                gaps,
                [draw.normal(size=k).round(2).tolist() for k in lengths],
                old=[(-draw.exponential(1.0, size=k) - 0.01).tolist() for k in lengths],
                entropy_D=torch.as_tensor(draw.exponential(size=n)),
                behaviour_logp_D=torch.as_tensor(-draw.exponential(1.0, size=n)),
                ref_logp_D=torch.as_tensor(-draw.exponential(1.0, size=n)),
                group_R=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
                reward_R=torch.as_tensor(draw.random(8)),
                columns={
                    "heat": torch.as_tensor(draw.uniform(-1, 1, size=n)),
                    "given": torch.as_tensor(np.repeat([0.0] * 7 + [1.0], lengths)),
                    "segment": torch.as_tensor(
                        np.concatenate([np.arange(k) // 3 for k in lengths]).astype(float)
                    ),
                },
                vocabulary=20,
            )
            continue
        sizes = [3] * 8
        step_R = [np.minimum(np.arange(k) // max(1, k // 3), 2) for k in lengths]
        extra = {name: draw.integers(0, 6, size=8).astype(float) for name in COUNTS}
        extra |= {"budget_R": np.full(8, 4.0), "context_R": draw.integers(-1, 2, size=8) * 1.0}
        extra |= {"ratio_R": draw.random(8) + 0.2, "score_norm_R": draw.random(8) + 0.5}
        extra |= {"think_entropy_R": draw.random(8), "answer_entropy_R": draw.random(8) / 2}
        extra |= {"sum_square_D": draw.random(n), "tempered_logp_D": -draw.random(n)}
        extra |= {"planning_D": draw.integers(0, 2, size=n).astype(float)}
        extra |= {"reasoning_D": draw.integers(0, 2, size=n).astype(float)}
        extra |= {"prompt_confidence_R": draw.random(8)}
        extra |= {"prior_R": np.repeat([0.3, np.nan], 4), "past_share_R": np.repeat([0.3, 0.9], 4)}
        binary = spread < 1
        outcome = draw.integers(0, 2, size=8) * 1.0 if binary else draw.random(8)
        outcome[0], outcome[5] = 1.0, 0.25
        if spread == 0.5:
            outcome[:4] = 1.0
        if spread == 2.0 and seed % 2:
            outcome[4:] = outcome[:4]  # groups of equal rates
        yield rewards(
            outcome[:4].tolist(),
            outcome[4:].tolist(),
            lengths=lengths,
            part_RM=draw.random((8, 2)),
            part_names=("structure", "content"),
            logp_R=-draw.random(8) * 9,
            logp_D=-draw.exponential(0.7, size=n),
            entropy_D=draw.exponential(0.5, size=n),
            token_D=draw.integers(0, 3, size=n),
            step_R=step_R,
            state_keys_R=[tuple(draw.integers(0, 2, size=k).tolist()) for k in sizes],
            step_reward_R=[draw.random(k) for k in sizes],
            answer_R=draw.integers(0, 3, size=8).tolist(),
            baseline_R=draw.random(8),
            extra=extra,
        )


BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("bnpo", "alpha"): {"beta": 1.5},
    ("bnpo", "beta"): {"alpha": 1.5},
    ("riskpo", "q_low"): {"q_high": 3.0},
    ("riskpo", "q_high"): {"q_low": -1.0},
    ("riskpo", "quantiles"): {"q_low": 0.1, "q_high": 1.1},
    ("length_outlier", "right"): {"k": 1.0},
    ("d3s_dual", "keep_end"): {"progress": 0.5},
    ("d3s_dual", "share_end"): {"progress": 0.5},
    **{("drpo", name): {"right": 0.5} for name in ("lam", "tau", "max_tokens")},
}
"""What an option needs beside it to count, as its docstring says."""
FILLED = {"max_tokens": 8, "buffer": 4, "step": 3, "steps": 10}


def options_of(kind: str) -> list[Any]:
    found = []
    for name, entry in REGISTRIES[kind].items():
        for p in inspect.signature(entry.fn).parameters.values():
            if p.kind is p.KEYWORD_ONLY and not p.name.endswith("_D"):
                found.append(pytest.param(kind, entry, p, id=f"{name}-{p.name}"))
    return found


def result(kind: str, entry: Entry, batch: Any, **options: Any) -> Any:
    names = inspect.signature(entry.fn).parameters
    given = {k: v for k, v in FILLED.items() if k in names} | options
    if "next_gap" in entry.needs:
        given["next_gap_D"] = torch.full_like(batch.old_logp_D, 0.3)
    try:
        if kind == "losses":
            (slope_D,) = torch.autograd.grad(entry.fn(batch, **given).sum(), batch.logp_D)
            return slope_D.tolist()
        return np.asarray(entry.fn(batch, **given)).tolist()
    except (ConfigError, ArithmeticError, ValueError, RuntimeWarning) as exc:
        return type(exc)


def moves_state(entry: Entry, kind: str, batch: Any, options: dict[str, Any]) -> bool:
    """Does the option change the state after a step?"""
    step, seen = entry.after_step, RatioFacts(0.5, 3) if kind == "losses" else batch
    assert step is not None
    start = {name: value + 0.1 for name, value in step({}, seen, {}).items()}
    try:
        return step(start, seen, options) != step(start, seen, {})
    except (ArithmeticError, ConfigError):
        return False


def moves_columns(entry: Entry, batch: Any, options: dict[str, Any]) -> bool:
    """Does the option change what the loss is given besides advantages?"""
    assert entry.columns is not None
    plain, other = entry.columns(batch, {}), entry.columns(batch, options)
    return plain.keys() != other.keys() or any((plain[n] != other[n]).any() for n in plain)


def moves_carry(entry: Entry, batch: Any, options: dict[str, Any]) -> bool:
    """Does the option change what rows carry to the next pass?"""
    if entry.carry is None:
        return False
    plain, other = entry.carry(batch), entry.carry(batch, **options)
    return any(not torch.equal(plain[n], other[n]) for n in plain)


def has_effect(kind: str, entry: Entry, parameter: inspect.Parameter) -> bool:
    """Does some other value of the option change a gradient, a value, or the entry's state?"""
    name = parameter.name
    beside = BESIDE.get((entry.name, name), {})
    for seed in range(6):
        for batch in random_batches(kind, seed):
            plain = result(kind, entry, batch, **beside)
            base = FILLED.get(name, parameter.default)
            for other in alternatives(base):
                changed = result(kind, entry, batch, **beside, **{name: other})
                if isinstance(changed, list) and changed != plain:
                    return True
                if kind == "losses" and moves_carry(entry, batch, {name: other}):
                    return True
                tells = kind == "credit" and entry.columns is not None
                if tells and moves_columns(entry, batch, {name: other}):
                    return True
                if entry.after_step is not None and moves_state(entry, kind, batch, {name: other}):
                    return True
    return False


@pytest.mark.parametrize(
    ("kind", "entry", "parameter"),
    list(itertools.chain.from_iterable(map(options_of, ("losses", "advantages")))),
)
def test_every_option_of_losses_and_advantages_changes_something(
    kind: str, entry: Entry, parameter: inspect.Parameter
) -> None:
    assert has_effect(kind, entry, parameter)


@pytest.mark.parametrize(
    ("kind", "entry", "parameter"),
    list(itertools.chain.from_iterable(map(options_of, ("rewards", "credit")))),
)
def test_every_option_of_rewards_and_credit_changes_something(
    kind: str, entry: Entry, parameter: inspect.Parameter
) -> None:
    assert has_effect(kind, entry, parameter)
