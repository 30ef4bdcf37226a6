"""Strategies of one turn: on a scripted policy, behind the real sampler, and in the trainer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from tests.rl.test_trainer import comparable, fingerprint
from tests.rl.tiny import CharTokenizer, EvenTokens, tiny_config, tiny_hf, tiny_parts, tiny_tasks
from tfgrpo.errors import ConfigError
from tfgrpo.protocols import Generated, Sampling
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.generation.requests import GroupRequest
from tfgrpo.rl.model.decoder import decoder_from_hf
from tfgrpo.rl.strategies.echo import Echo, width_of
from tfgrpo.rl.strategies.growth import (
    Ask,
    Draw,
    Growth,
    Judge,
    Leaf,
    Look,
    Root,
    TokenDistributions,
)
from tfgrpo.rl.strategies.latr import Latr
from tfgrpo.rl.strategies.look import look_at
from tfgrpo.rl.strategies.trees import TokenTree, ValueChain, uncertain_cuts
from tfgrpo.rl.strategy_options import ChainOptions, EchoOptions, LatrOptions, TreeOptions
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rl.update.rollout_rows import n_steps, row_of, step_numbers
from tfgrpo.rl.update.token_stats import measure_rows
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.runtime.texts.edit_distance import edit_ratio

Next = Callable[[Sequence[int]], dict[int, float]]
"""Tokens so far to the distribution of the next one."""
EOS = 0


def drive(
    growth: Growth, root: Root, following: Next, reward: Callable[[Sequence[int]], float]
) -> tuple[list[Leaf], list[Ask]]:
    """Run a strategy on a policy that is written out; check that it asks within its limits."""
    asked: list[Ask] = []

    def draw(ids: Sequence[int], seed: int, limit: int) -> Generated:
        tokens, logps, sofar = [], [], list(ids)
        while len(tokens) < limit:
            p = following(sofar)
            u = np.random.default_rng([seed, len(sofar)]).random()
            edges = np.cumsum(list(p.values()))
            token = list(p)[int((edges <= u * edges[-1]).sum())]
            tokens.append(token)
            logps.append(math.log(p[token]))
            sofar.append(token)
            if token == EOS:
                return Generated(tuple(tokens), tuple(logps), "stop")
        return Generated(tuple(tokens), tuple(logps), "length")

    def seen(ids: Sequence[int], first: int, k: int) -> TokenDistributions:
        rows = [
            sorted(following(ids[:t]).items(), key=lambda x: -x[1]) for t in range(first, len(ids))
        ]
        padded = [(r + [(99, 1e-9)] * k)[:k] for r in rows]
        top = np.array([[t for t, _ in r] for r in padded], dtype=np.int64).reshape(-1, k)
        p = np.array([[x for _, x in r] for r in padded]).reshape(-1, k)
        entropy = np.array([-sum(x * math.log(x) for _, x in r) for r in rows])
        return TokenDistributions(top, p, np.log(p), entropy)

    steps: Generator[Ask, Any, list[Leaf]] = growth.grow(root)
    answer: Any = None
    while True:
        try:
            ask = steps.send(answer)
        except StopIteration as ended:
            return ended.value, asked
        asked.append(ask)
        if isinstance(ask, Draw):
            assert all(1 <= p.limit <= root.limit - len(p.ids) for p in ask.pieces)
            answer = [draw(p.ids, p.seed, p.limit) for p in ask.pieces]
        elif isinstance(ask, Look):
            answer = [seen(r, f, ask.k) for r, f in zip(ask.rows, ask.first, strict=True)]
        else:
            answer = [reward(ids) for ids in ask.rows]


TASK = Task("t", "x")


def root_of(size: int, limit: int = 40, seed: int = 1, step: int = 0) -> Root:
    return Root(TASK, (7, 8), size, limit, seed, step, (EOS,))


def coin(ids: Sequence[int]) -> dict[int, float]:
    """Two tokens of 0.5 and 0.45, and a rare end."""
    return {1: 0.5, 2: 0.45, EOS: 0.05}


def sure(ids: Sequence[int]) -> dict[int, float]:
    """One token for sure, ended after 30."""
    return {EOS: 1.0} if len(ids) >= 30 else {1: 1.0}


def no_reward(ids: Sequence[int]) -> float:
    raise AssertionError("nothing is judged")


# ── LATR ────────────────────────────────────────────────────────────────────────────────────────


def test_latr_never_passes_its_budget_and_keeps_the_root() -> None:
    for size, seed in itertools.product((1, 2, 5, 8), range(4)):
        leaves, _ = drive(Latr(LatrOptions(ahead=5)), root_of(size, seed=seed), coin, no_reward)
        again, _ = drive(Latr(LatrOptions(ahead=5)), root_of(size, seed=seed), coin, no_reward)
        assert len(leaves) == size and leaves == again
        assert leaves[0].seed == root_of(size, seed=seed).row_seed(0)
        for leaf in leaves:
            assert len(leaf.ids) == len(leaf.logps) <= 40
            assert leaf.is_cut == (leaf.ids[-1] != EOS)
            want = [math.log(coin(leaf.ids[:t])[x]) for t, x in enumerate(leaf.ids)]
            assert leaf.logps == pytest.approx(want)


def test_latr_drops_children_that_stay_like_their_parent() -> None:
    """After either first token everything is the same: no child differs by two tokens in five."""

    def alike(ids: Sequence[int]) -> dict[int, float]:
        if not ids:
            return {1: 0.5, 2: 0.5}
        return {EOS: 1.0} if len(ids) > 20 else {5: 1.0}

    leaves, asked = drive(Latr(LatrOptions(ahead=5, edit=0.4)), root_of(4), alike, no_reward)
    looks = [a for a in asked if isinstance(a, Look)]
    assert all(len(look.rows) == 1 for look in looks), "a child was kept"
    assert len(leaves) == 4
    kept, _ = drive(Latr(LatrOptions(ahead=5, edit=0.1)), root_of(4), alike, no_reward)
    assert {leaf.ids[0] for leaf in kept[:2]} == {1, 2}


def test_latr_branches_by_both_thresholds_and_fades_over_training() -> None:
    def skewed(ids: Sequence[int]) -> dict[int, float]:
        return {1: 0.7, 2: 0.25, EOS: 0.05}

    leaves, asked = drive(Latr(LatrOptions(ahead=5)), root_of(4), skewed, no_reward)
    del leaves
    assert all(len(a.rows) == 1 for a in asked if isinstance(a, Look))  # .45 apart: none
    late, asked = drive(Latr(LatrOptions(ahead=5)), root_of(4, step=300), coin, no_reward)
    assert not any(isinstance(a, Look) for a in asked) and len(late) == 4
    options = LatrOptions()
    assert [options.share_at(s) for s in (0, 99, 100, 250, 999)] == [1.0, 1.0, 0.75, 0.5, 0.25]


def pairwise_edit(rows: Sequence[Sequence[int]]) -> float:
    return float(np.mean([edit_ratio(a, b) for a, b in itertools.combinations(rows, 2)]))


def test_latr_makes_rows_that_differ_more_than_plain_ones_at_equal_tokens() -> None:
    """A policy whose second token forks into two worlds of which plain rows often miss one."""

    def worlds(ids: Sequence[int]) -> dict[int, float]:
        if len(ids) == 1:
            return {10: 0.6, 11: 0.4}
        if len(ids) > 12:
            return {EOS: 1.0}
        base = ids[1] if len(ids) > 1 else 1
        return {base + 10: 1.0} if ids else {1: 1.0}

    gains = []
    for seed in range(20):
        tree, _ = drive(Latr(LatrOptions(ahead=6)), root_of(2, seed=seed), worlds, no_reward)
        plain, _ = drive(
            Latr(LatrOptions(ahead=6, shares={0: 0.01})), root_of(2, seed=seed), worlds, no_reward
        )
        assert sum(len(x.ids) for x in tree) == sum(len(x.ids) for x in plain)
        gains.append(pairwise_edit([x.ids for x in tree]) - pairwise_edit([x.ids for x in plain]))
    assert np.mean(gains) > 0.2 and min(gains) >= 0


def test_edit_ratio_is_the_distance_by_brute_force() -> None:
    def slow(a: Sequence[int], b: Sequence[int]) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    rng = np.random.default_rng(0)
    for _ in range(60):
        a, b = (rng.integers(0, 3, rng.integers(0, 6)).tolist() for _ in range(2))
        assert edit_ratio(a, b) == slow(a, b) / max(1, len(a), len(b))


# ── trees and chains ────────────────────────────────────────────────────────────────────────────


def test_a_tree_names_its_nodes_and_its_leaves_share_their_tokens() -> None:
    tree = TokenTree(TreeOptions(factors=(2, 3), segment=4))
    leaves, asked = drive(tree, root_of(6), coin, no_reward)
    assert len(leaves) == 6
    early = [x for x in leaves if x.metadata["state_keys"] == ["root"]]
    assert early and all(x.ids[-1] == EOS or len(x.ids) == 40 for x in early)
    for leaf in leaves:
        segments, keys = leaf.metadata["segments"], leaf.metadata["state_keys"]
        assert sum(segments) == len(leaf.ids) and len(keys) == len(segments)
        assert keys[0] == "root"
    for a, b in itertools.combinations(leaves, 2):
        shared = [x for x, y in zip(a.metadata["state_keys"], b.metadata["state_keys"]) if x == y]
        n = sum(a.metadata["segments"][: len(shared) - 1])
        assert a.ids[:n] == b.ids[:n]
    whole, _ = drive(tree, root_of(6), sure, no_reward)
    assert len(whole) == 6 and len({x.seed for x in whole}) == 6
    assert next(len(a.pieces) for a in asked if isinstance(a, Draw)) == 2


def test_cuts_are_values_of_their_continuations() -> None:
    """A walk whose success chance is known at every place: a right first token makes it 0.9."""

    def walk(ids: Sequence[int]) -> dict[int, float]:
        if len(ids) == 0:
            return {1: 0.5, 2: 0.5}
        if len(ids) == 1:
            return {3: 0.9, 4: 0.1} if ids[0] == 1 else {3: 0.2, 4: 0.8}
        return {EOS: 1.0}

    chain = ValueChain(ChainOptions(every=1, below=0.95, draws=400, most_cuts=2))
    leaves, asked = drive(chain, root_of(4), walk, lambda ids: float(ids[1] == 3))
    judged = [a for a in asked if isinstance(a, Judge)]
    assert len(judged) == 1
    for leaf in leaves:
        values = leaf.metadata["step_rewards"]
        assert leaf.metadata["segments"] == [1, 1, 1] and len(values) == 3
        truth = [0.55, 0.9 if leaf.ids[0] == 1 else 0.2, float(leaf.ids[1] == 3)]
        for value, p in zip(values, truth, strict=True):
            assert abs(value - p) <= 3 * math.sqrt(max(p * (1 - p), 1e-9) / 400) + 1e-9


def test_uncertain_tokens_are_counted() -> None:
    logps = [math.log(p) for p in (0.5, 0.95, 0.5, 0.5, 0.99, 0.5, 0.5)]
    assert uncertain_cuts(logps, every=2, below=0.9) == [3, 6]
    assert uncertain_cuts(logps, every=1, below=0.9) == [1, 3, 4, 6]  # not after the last token
    assert uncertain_cuts(logps, every=9, below=0.9) == []


# ── ECHO ────────────────────────────────────────────────────────────────────────────────────────


def test_echo_widens_with_entropy_and_narrows_with_confidence() -> None:
    options = EchoOptions(most_width=4, reference=2.0)
    widths = [[width_of(h, c, options) for c in (0.0, 0.5, 1.0)] for h in (0.0, 1.0, 2.0, 9.0)]
    assert widths == [[1, 1, 1], [3, 2, 1], [4, 3, 1], [4, 3, 1]]
    for row in widths:
        assert row == sorted(row, reverse=True)
    for column in zip(*widths, strict=True):
        assert list(column) == sorted(column)


def test_echo_spreads_its_budget_and_a_row_that_was_ended_never_comes_back() -> None:
    options = EchoOptions(window=4, first=2, most_width=3, floor=0.5, checks=2)
    for seed in range(6):
        leaves, _ = drive(Echo(options), root_of(6, seed=seed), coin, no_reward)
        assert len(leaves) == 6
        again, _ = drive(Echo(options), root_of(6, seed=seed), coin, no_reward)
        assert leaves == again
        # every row is drawn from its own beginning on without a gap
        for leaf in leaves:
            assert len(leaf.ids) == len(leaf.logps) and len(leaf.ids) <= 40
    never = EchoOptions(window=4, first=2, most_width=1, floor=0.0)
    leaves, _ = drive(Echo(never), root_of(3), sure, no_reward)
    assert {leaf.ids for leaf in leaves} == {(1,) * 30 + (EOS,)}


def test_echo_ends_rows_that_stay_unsure() -> None:
    """A row drawn among fifty tokens beside a sure one: it is ended after two looks."""
    noise = dict.fromkeys(range(1, 51), 0.02)
    first: list[int] = []

    def following(ids: Sequence[int]) -> dict[int, float]:
        if not ids:
            return {60: 0.5, 61: 0.5}
        return dict(noise) if ids[0] == 60 else sure(ids)

    options = EchoOptions(window=4, first=2, most_width=1, floor=0.3, checks=2)
    for seed in range(40):
        root = root_of(3, limit=40, seed=seed)
        leaves, asked = drive(Echo(options), root, following, no_reward)
        starts = [a.rows for a in asked if isinstance(a, Look)]
        kinds = {ids[0] for ids in starts[0]}
        if kinds == {60, 61}:
            first.append(seed)
            assert sum(ids[0] == 60 for ids in starts[1]) == 1
            assert not any(ids[0] == 60 for look in starts[2:] for ids in look)
            assert len(leaves) == 3
    assert first


# ── behind the real sampler ─────────────────────────────────────────────────────────────────────


def test_what_is_looked_at_is_what_a_model_says() -> None:
    model = tiny_hf()
    decoder = decoder_from_hf(model, share=False)
    prompt, rows = (5, 9, 11), ((20, 21, 22), (7,), ())
    seen = look_at(
        decoder, prompt, Look(rows, (1, 0, 0), 3), temperature=0.7, max_tokens=64, chunk=2
    )
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *rows[0]]])).logits[0].double()
    for t, place in enumerate((3, 4)):
        p = (logits[place] / 0.7).softmax(-1)
        top, ids = p.topk(3)
        assert seen[0].top_TK[t].tolist() == ids.tolist()
        assert seen[0].p_TK[t].tolist() == pytest.approx(top.tolist(), abs=1e-5)
        raw = logits[place].log_softmax(-1)[ids]
        assert seen[0].logp_TK[t].tolist() == pytest.approx(raw.tolist(), abs=1e-5)
        entropy = float(-(p * p.log()).sum())
        assert float(seen[0].entropy_T[t]) == pytest.approx(entropy, abs=1e-5)
    assert len(seen[1].entropy_T) == 1 and len(seen[2].entropy_T) == 0


def test_a_row_drawn_in_windows_is_the_row_drawn_at_once() -> None:
    generator = GroupGenerator(decoder_from_hf(tiny_hf()), eos_ids=(2,), max_rows=8)
    prompt, sampling = (5, 9, 11), Sampling(max_tokens=20)
    whole = generator.generate([prompt], 6, sampling, [list(range(6))])[0]
    ids: list[list[int]] = [[] for _ in range(6)]
    logps: list[list[float]] = [[] for _ in range(6)]
    done = [False] * 6
    for window in (3, 1, 7, 9):
        requests = [
            GroupRequest(i, (*prompt, *ids[i]), (i,), window, len(ids[i]))
            for i in range(6)
            if not done[i]
        ]

        def take(request: GroupRequest, rows: list[Generated]) -> list[GroupRequest]:
            i = request.key
            ids[i] += rows[0].token_ids
            logps[i] += rows[0].logprobs
            done[i] = rows[0].finish == "stop"
            return []

        generator.run(requests, sampling, take)
    assert [tuple(x) for x in ids] == [r.token_ids for r in whole]
    for got, row in zip(logps, whole, strict=True):
        assert got == pytest.approx(list(row.logprobs), abs=1e-4)


def test_a_stop_string_may_begin_before_the_seam() -> None:
    text = CharTokenizer()
    generator = GroupGenerator(
        decoder_from_hf(tiny_hf()), eos_ids=(2,), detokenize=text.decode, max_rows=4
    )
    prompt = (5, 9, 11)
    (whole,) = generator.generate([prompt], 1, Sampling(max_tokens=12), [[4]])
    stop = text.decode(list(whole[0].token_ids[3:6]))
    found: list[Generated] = []

    def take(request: GroupRequest, rows: list[Generated]) -> list[GroupRequest]:
        found.extend(rows)
        return []

    before = whole[0].token_ids[:5]
    request = GroupRequest("k", (*prompt, *before), (4,), 7, len(before))
    generator.run([request], Sampling(max_tokens=12, stop=(stop,)), take)
    assert found[0].token_ids == whole[0].token_ids[5:6] and found[0].finish == "stop"


class Even(EvenTokens):
    """1 where half of the tokens are even."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        share = await super().score(rollout, task)
        return Score(float(share.reward >= 0.5))


def trainer_of(folder: Path, strategy: str, options: dict[str, Any], **sections: Any) -> Trainer:
    rollout = {
        "strategy": strategy,
        "strategy_options": options,
        "group_size": 4,
        "tasks_per_step": 3,
        "max_tokens": 10,
        **sections.pop("rollout", {}),
    }
    optimiser = {"lr": 1e-3, "micro_batch_tokens": 4000, **sections.pop("optimiser", {})}
    config = tiny_config(folder, rollout=rollout, optimiser=optimiser, **sections)
    return Trainer(config, tiny_parts(), tiny_tasks(), Even())


STRATEGIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("latr", {"ahead": 3, "tau_abs": 0.01, "tau_rel": 0.5, "edit": 0.1}, {}),
    ("tree", {"factors": [2, 2], "segment": 3}, {"credit": {"name": "spo_tree"}}),
    ("tree", {"factors": [2, 2], "segment": 3}, {"credit": {"name": "branch_grpo"}}),
    (
        "spo_chain",
        {"every": 3, "draws": 2, "most_cuts": 2},
        {"credit": {"name": "spo_chain", "options": {"below": 1.0}}},
    ),
    ("echo", {"window": 3, "floor": 0.01}, {}),
]


@pytest.mark.parametrize(("name", "options", "sections"), STRATEGIES, ids=lambda x: str(x)[:12])
def test_a_strategy_trains_and_a_stopped_run_goes_on_bit_equal(
    name: str, options: dict[str, Any], sections: dict[str, Any], tmp_path: Path
) -> None:
    def made(folder: str) -> Trainer:
        return trainer_of(tmp_path / folder, name, options, **sections)

    whole, first = made("whole"), made("cut")
    reports = [whole.step() for _ in range(3)]
    for report in reports:
        for group in report.groups:
            assert len(group.rollouts) == 4
            for rollout in group.rollouts:
                assert len(step_numbers(rollout)) == row_of(rollout, index=0).n_loss
                assert n_steps(rollout) >= 1
    assert any(r.figures["grad_norm"] > 0 for r in reports)
    first.step()
    first.save()
    second = made("cut")
    assert second.resume()
    for report in reports[1:]:
        assert comparable(second.step().figures) == comparable(report.figures)
    assert fingerprint(second) == fingerprint(whole)


def test_sampled_log_probs_of_a_tree_are_those_of_the_policy(tmp_path: Path) -> None:
    options = {"ahead": 3, "tau_abs": 0.01, "tau_rel": 0.5, "edit": 0.1}
    trainer = trainer_of(tmp_path, "latr", options)
    groups = trainer._roller.roll(0).groups
    rows = [row_of(r, index=i) for i, r in enumerate(r for g in groups for r in g.rollouts)]
    told = [r.steps[0].logprobs for g in groups for r in g.rollouts]
    found = measure_rows(
        trainer._model.decoder, rows, temperature=1.0, max_tokens=4000, chunk=64
    ).logp
    for i, logps in enumerate(told):
        assert list(logps or ()) == pytest.approx(list(found[i]), abs=1e-4)


def test_every_token_of_a_tree_is_sampled_once_and_is_in_a_row(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "tree", {"factors": [2, 2], "segment": 3})
    for _ in range(2):
        report, sampled = trainer.step(), 0
        for group in report.groups:
            edges: dict[str, int] = {}
            for rollout in group.rollouts:
                *inner, last = rollout.metadata["segments"]
                edges |= dict(zip(rollout.metadata["state_keys"][1:], inner, strict=True))
                sampled += last  # a leaf's own
            sampled += sum(edges.values())
        in_rows = sum(row_of(r, index=0).n_loss for g in report.groups for r in g.rollouts)
        assert report.figures["completion_tokens"] == sampled < in_rows
        assert report.figures["rollouts"] == 4 * len(report.groups)


def test_values_of_cuts_are_judged_and_not_trained(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, *STRATEGIES[3][:2], **STRATEGIES[3][2])
    rolled = trainer._roller.roll(0)
    figures = trainer._maker.figures
    cuts = sum(n_steps(r) - 1 for g in rolled.groups for r in g.rollouts)
    assert figures.value_rollouts == 2 * (cuts + len(rolled.groups))
    assert figures.rollouts == sum(len(g.rollouts) for g in rolled.groups)
    for group in rolled.groups:
        for rollout in group.rollouts:
            values = rollout.metadata["step_rewards"]
            assert all(0 <= v <= 1 for v in values) and len(values) == n_steps(rollout)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"rollout": {"strategy": "tree"}}, "has 8 leaves, and rollout.group_size is 4"),
        ({"rollout": {"strategy": "arpo"}}, r"for rollouts of several turns: set \[multi_turn\]"),
        (
            {"rollout": {"strategy": "latr"}, "multi_turn": {"environment": "a:b"}},
            "it is for replies of one turn",
        ),
        ({"rollout": {"strategy": "latr"}, "hints": {"name": "sage"}}, r"with \[hints\]"),
        ({"rollout": {"strategy": "echo"}, "curriculum": {"allocate": "vade"}}, "allocate"),
        (
            {"rollout": {"strategy": "april"}, "curriculum": {"max_resample_rounds": 3}},
            "max_resample_rounds above 1",
        ),
        ({"rollout": {"strategy": "april"}, "engine": {"kind": "vllm"}}, "engine.kind 'vllm'"),
        ({"rollout": {"strategy": "april"}, "loss": {"name": "opmd"}}, "'april' with loss 'opmd'"),
        ({"rollout": {"strategy_options": {"a": 1}}}, "'plain' has no options"),
        (
            {"rollout": {"strategy": "latr", "strategy_options": {"tau": 1}}},
            r"unknown key 'tau'; did you mean 'tau_rel'",
        ),
        ({"credit": {"name": "branch_grpo"}}, "rollout.strategy = 'tree'"),
    ],
)
def test_settings_that_contradict_a_strategy_are_named(
    sections: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        tiny_config(tmp_path, **sections)
