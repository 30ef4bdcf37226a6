"""Rollout budgets on recorded success rates: predicted, noisy and known rates against uniform.

    python -m tests.benchmarks.routing.routing_budget

`plans` is what one full mixed group of 8 costs: dynamic sampling, a probe first, the best quarter
by text first, both; by replay on held-out prompts. A plan's `variance_against_dynamic` is that of
the mean over its full mixed groups, p(1 − p)/8 each, at equal rollouts spent.
`variance_against_uniform` is the mean of p(1 − p)/n over all prompts, where the same total is dealt
out after a probe. The rest is the share of groups with mixed outcomes at equal total, 2 to 64
rollouts a prompt. The "true" rate is itself a mean of ten rollouts, so the oracle row is optimistic
near 0 and 1. `real` rows predict with the value model: `within` from half of a checkpoint's rows,
`earlier` from the same policy's earlier checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.record import record
from tests.benchmarks.routing.routing_data import RoutingSet, embedder, load
from tfgrpo.routing.backtest.metrics import area, brier, pair_accuracy
from tfgrpo.routing.budgets.posterior_gain import (
    GRID,
    PosteriorGain,
    PredictionError,
    mixed_share,
    pool_weights,
    uniform,
)
from tfgrpo.routing.budgets.practice import Practice
from tfgrpo.routing.estimator.laplace import Gaussian, logit
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import Estimates, ModelState, ValueModel

Array = NDArray[np.float64]

CONTEXT = 0
GROUPS = (4, 8)


def useful(counts: list[int], p: Array) -> float:
    """Return the mean share of mixed groups."""
    return float(mixed_share(p, np.array(counts)).mean())


def noisy(p: Array, sd: float, rng: np.random.Generator) -> Estimates:
    """Return estimates that are p plus noise, cut to [0, 1]."""
    mean = np.clip(p + sd * rng.standard_normal(len(p)), 0.0, 1.0)
    zero = np.zeros_like(mean)
    flat = Gaussian(logit(mean), zero + 1.0)
    return Estimates(mean, zero, zero + 1, 0.9, zero, ("covered",) * len(p), {}, flat)


def simulated(
    name: str, p: Array, history: Array, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """The table with noise that is known: oracle, point estimate and posterior at each noise."""
    rows = []
    pool = pool_weights(history * 10, np.full(len(history), 10.0))
    nothing = np.zeros(len(p))
    for g in GROUPS:
        budget = g * len(p)
        base = useful(uniform(len(p), budget), p)
        rule = PosteriorGain(guard=False)
        sharp = PosteriorGain(error=PredictionError(sd=0.012), guard=False)
        flat = np.ones_like(pool)
        point = sharp.posterior(flat, nothing, nothing, noisy(p, 0.0, rng))
        row = {"policy": name, "g": g, "uniform": round(base, 4)}
        row["oracle"] = round(useful(rule.from_posterior(point, budget), p) / base - 1, 4)
        for sd in (0.1, 0.2, 0.3):
            e = noisy(p, sd, rng)
            as_point = sharp.posterior(flat, nothing, nothing, e)
            known = PosteriorGain(error=PredictionError(sd=sd))
            counts = known.from_posterior(known.posterior(pool, nothing, nothing, e), budget)
            point_counts = rule.from_posterior(as_point, budget)
            row[f"point_{sd}"] = round(useful(point_counts, p) / base - 1, 4)
            row[f"posterior_{sd}"] = round(useful(counts, p) / base - 1, 4)
        rows.append(row)
    return rows


def rows_of(data: RoutingSet, column: int) -> NDArray[np.intp]:
    """Return the context prompts of one policy and step."""
    assert data.roles is not None
    return np.flatnonzero(data.roles[:, column] == CONTEXT)


def state_of(value: ValueModel, data: RoutingSet, cells: list[tuple[int, int]]) -> ModelState:
    """Return the state of the given (prompt, column) cells; the newest column wins."""
    latest = dict(sorted(cells, key=lambda c: c[1]))
    rows = np.array(sorted(latest), dtype=np.intp)
    columns = np.array([latest[int(i)] for i in rows], dtype=np.intp)
    return value.state_of_counts(
        data.vectors[rows],
        data.table.successes[rows, columns],
        data.table.trials[rows, columns],
        keys=[data.table.keys[i] for i in rows],
    )


def other_policy(data: RoutingSet, policy: str) -> ValueModel:
    """Return a value model whose reference is the other policy's recorded rates."""
    columns = [j for j, m in enumerate(data.models) if m["policy"] != policy]
    table = data.table.of_models(columns)
    known = np.flatnonzero((table.trials > 0).any(axis=1))
    pool = ReferencePool.fit(
        table.take(known), data.vectors[known], embedder_id=embedder().embedder_id
    )
    return ValueModel(embedder(), pool)


def real(data: RoutingSet, seeds: int = 3) -> list[dict[str, Any]]:
    """Allocate with the value model's predictions, guard on."""
    rows = []
    for column, info in enumerate(data.models):
        value = other_policy(data, info["policy"])
        mine = rows_of(data, column)
        earlier = [
            (int(i), j)
            for j, other in enumerate(data.models)
            if other["policy"] == info["policy"] and other["step"] < info["step"]
            for i in rows_of(data, j)
        ]
        cases: list[tuple[str, ModelState, NDArray[np.intp], Array, Array]] = []
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(mine)
            half = len(order) // 2
            known = [(int(i), column) for i in order[:half]]
            nothing = np.zeros(len(order) - half)
            state = state_of(value, data, known)
            cases.append((f"within {seed}", state, order[half:], nothing, nothing))
        if earlier:
            state = state_of(value, data, [c for c in earlier if c[0] not in set(mine.tolist())])
            k, n = _seen(data, earlier, mine)
            cases.append(("earlier", state, mine, k, n))
            again = n > 0
            cases.append(("revisited", state, mine[again], k[again], n[again]))
        for setting, state, asked, k, n in cases:
            rows += _case((info["name"], setting), state, data, column, asked, (k, n))
    return rows


def _seen(
    data: RoutingSet, earlier: list[tuple[int, int]], asked: NDArray[np.intp]
) -> tuple[Array, Array]:
    """Successes and trials of each asked prompt at earlier checkpoints, older ones halved."""
    k, n = np.zeros(len(asked)), np.zeros(len(asked))
    line = {int(i): at for at, i in enumerate(asked)}
    for i, j in sorted(earlier, key=lambda c: c[1]):
        if i in line:
            at = line[i]
            k[at] = 0.5 * (k[at] + data.table.successes[i, j])
            n[at] = 0.5 * (n[at] + data.table.trials[i, j])
    return k, n


def _case(
    name: tuple[str, str],
    state: ModelState,
    data: RoutingSet,
    column: int,
    asked: NDArray[np.intp],
    seen: tuple[Array, Array],
) -> list[dict[str, Any]]:
    p = data.table.rates[asked, column]
    estimates = state.predict_vectors(data.vectors[asked])
    rule = PosteriorGain(error=PredictionError.of_state(state))
    pool = pool_weights(state.counts, state.trials)
    blind = float(state.counts.sum() / state.trials.sum())
    weights = rule.posterior(pool, *rule.faded(*seen), estimates)
    rows = []
    for g in GROUPS:
        budget = g * len(asked)
        even = uniform(len(asked), budget)
        counts = rule.from_posterior(weights, budget)
        base = useful(even, p)
        rows.append(
            {
                "policy": name[0],
                "setting": name[1],
                "prompts": len(asked),
                "g": g,
                "uniform": round(base, 4),
                "vs_uniform": round(useful(counts, p) / base - 1, 5),
                "guard_held": counts == even,
                "auc": round(area(estimates.mean, p), 4),
                "brier": round(brier(estimates.mean, p), 4),
                "brier_prompt_blind": round(brier(np.full(len(p), blind), p), 4),
            }
        )
    return rows


SIZE, PROBE, QUARTER, FOLDS, DRAWS = 8, 3, 0.25, 4, 200


def practice_cases(data: RoutingSet) -> list[dict[str, Array]]:
    """For each checkpoint: rates, posteriors by text and by pool alone of prompts held out."""
    found = []
    for column, info in enumerate(data.models):
        value = other_policy(data, info["policy"])
        mine = np.random.default_rng(0).permutation(rows_of(data, column))
        rates, by_text, by_pool, chances = [], [], [], []
        for fold in np.array_split(mine, FOLDS):
            held = set(fold.tolist())
            state = state_of(value, data, [(int(i), column) for i in mine if int(i) not in held])
            rule = PosteriorGain(error=PredictionError.of_state(state))
            pool = pool_weights(state.counts, state.trials)
            nothing = np.zeros(len(fold))
            estimates = state.predict_vectors(data.vectors[fold])
            rates.append(data.table.rates[fold, column])
            by_text.append(rule.posterior(pool, nothing, nothing, estimates))
            by_pool.append(rule.posterior(pool, nothing, nothing, None))
            chances.append(mixed_share(estimates.mean, SIZE))
        found.append({"rates": np.concatenate(rates), "text": np.vstack(by_text),
                      "pool": np.vstack(by_pool), "chances": np.concatenate(chances)})  # fmt: skip
    return found


def plan_counts(
    plan: Practice, p: Array, weights: Array, chosen: Sequence[int], rng: np.random.Generator
) -> tuple[float, float, float, float]:
    """Of one pass over chosen prompts: rollouts, mixed full groups, rollouts in mixed groups, and
    the variance of the mean over the full ones, times the rollouts."""
    at = np.array(chosen)
    k = rng.binomial(plan.probe, p[at]).astype(float)
    n = np.full(len(at), float(plan.probe))
    more = np.array(plan.judge(weights[at], k, n).rollouts)
    k, n = k + rng.binomial(more, p[at]), n + more
    mixed = (k > 0) & (k < n)
    full = mixed & (n >= plan.size)
    spread = float((p[at] * (1 - p[at]) / n)[full].sum()) / max(full.sum(), 1) ** 2
    return float(n.sum()), float(full.sum()), float(n[mixed].sum()), float(n.sum()) * spread


def practised(cases: list[dict[str, Array]]) -> dict[str, Any]:
    """Rollouts for one full mixed group and useful rollouts of each plan, with bootstrap bounds.

    A draw takes prompts with return and rolls them out once. `uniform` gives every prompt the full
    size; `dynamic` is the same but keeps mixed groups only, so it pays as much for one.
    """
    whole, probing = Practice(size=SIZE, probe=SIZE), Practice(size=SIZE, probe=PROBE)
    plans = {
        "dynamic": (whole, "pool", 1.0), "probe": (probing, "pool", 1.0),
        "text": (whole, "text", QUARTER), "text_probe": (probing, "text", QUARTER),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    paid = {name: np.zeros((DRAWS, len(cases))) for name in plans}
    useful_share = {name: np.zeros((DRAWS, len(cases))) for name in plans}
    variance = {name: np.zeros((DRAWS, len(cases))) for name in plans}
    for c, case in enumerate(cases):
        for d in range(DRAWS):
            at = rng.integers(len(case["rates"]), size=len(case["rates"]))
            for name, (plan, kind, share) in plans.items():
                p, weights = case["rates"][at], case[kind][at]
                chosen = list(range(len(p)))
                if share < 1:
                    chosen = plan.select_by(case["chances"][at], int(share * len(p)), seed=d)
                spent, full, in_mixed, wide = plan_counts(plan, p, weights, chosen, rng)
                variance[name][d, c] = wide
                paid[name][d, c] = spent / max(full, 1)
                useful_share[name][d, c] = in_mixed / spent
    base = paid["dynamic"].mean(axis=1)
    rows = {}
    for name in plans:
        mean = paid[name].mean(axis=1)
        saved, share = 1 - mean / base, useful_share[name].mean(axis=1)
        wider = variance[name].mean(axis=1) / variance["dynamic"].mean(axis=1) - 1
        rows[name] = {
            "rollouts_per_full_mixed_group": round(float(mean.mean()), 2),
            "ci": _bounds(mean),
            "saved_against_dynamic": round(float(saved.mean()), 4),
            "saved_ci": _bounds(saved),
            "worst_checkpoint_saved": round(
                float((1 - paid[name].mean(axis=0) / paid["dynamic"].mean(axis=0)).min()), 4
            ),
            "useful_rollouts": round(float(share.mean()), 4),
            "useful_ci": _bounds(share),
            "variance_against_dynamic": round(float(wider.mean()), 4),
            "variance_ci": _bounds(wider),
        }
    return rows


def _bounds(values: Array) -> list[float]:
    return [round(float(v), 4) for v in np.quantile(values, [0.025, 0.975])]


def spread_out(cases: list[dict[str, Array]]) -> dict[str, Any]:
    """Mean of p(1 − p)/n against uniform at equal total: a probe, the rest by posterior spread."""
    rng, rows = np.random.default_rng(1), {}
    for g in GROUPS:
        gains = np.zeros((40, len(cases)))
        for c, case in enumerate(cases):
            for d in range(40):
                at = rng.integers(len(case["rates"]), size=len(case["rates"]))
                p, weights = case["rates"][at], case["text"][at]
                probe = min(PROBE, g - 1)
                k, n = rng.binomial(probe, p).astype(float), np.full(len(p), float(probe))
                more = Practice(size=g, probe=probe).spread(weights, k, n, (g - probe) * len(p))
                even = (p * (1 - p) / g).mean()
                gains[d, c] = (p * (1 - p) / (n + np.array(more))).mean() / even - 1
        rows[str(g)] = {"variance": round(float(gains.mean()), 4), "ci": _bounds(gains.mean(1)),
                        "worst": round(float(gains.mean(axis=0).max()), 4)}  # fmt: skip
    return rows


def by_history(data: RoutingSet) -> dict[str, Any]:
    """Mixed share of the best half of revisited prompts, chosen by their earlier checkpoint."""
    plan, gains, shares = Practice(size=SIZE, floor=0.0), [], []
    for b, later in enumerate(data.models):
        for a, first in enumerate(data.models):
            if first["policy"] != later["policy"] or not first["step"] < later["step"]:
                continue
            both = np.flatnonzero((data.table.trials[:, a] > 0) & (data.table.trials[:, b] > 0))
            seen = rows_of(data, a)
            pool = pool_weights(data.table.successes[seen, a], data.table.trials[seen, a])
            k, n = plan.rule.faded(data.table.successes[both, a], data.table.trials[both, a])
            chances = plan.rule.posterior(pool, k, n, None) @ mixed_share(GRID, SIZE)
            chosen = plan.select_by(chances, len(both) // 2)
            share = mixed_share(data.table.rates[both, b], SIZE)
            gains.append(float(share[chosen].mean() / share.mean() - 1))
            shares.append(float(share.mean()))
    return {
        "pairs": len(gains),
        "mixed_gain": round(float(np.mean(gains)), 4),
        "worst": round(min(gains), 4),
        "mixed_share": round(float(np.mean(shares)), 4),
    }


def shifted_pairs(data: RoutingSet) -> dict[str, Any]:
    """Order one prompt at two checkpoints of one policy whose rate moved by at least one half."""
    value = ValueModel(embedder())
    pairs = []
    for a, first in enumerate(data.models):
        for b, second in enumerate(data.models):
            if first["policy"] == second["policy"] and first["step"] < second["step"]:
                both = np.flatnonzero((data.table.trials[:, a] > 0) & (data.table.trials[:, b] > 0))
                moved = data.table.rates[both, b] - data.table.rates[both, a]
                pairs += [
                    (int(i), a, b, d) for i, d in zip(both, moved, strict=True) if abs(d) >= 0.5
                ]
    hidden = {i for i, *_ in pairs}
    states = [
        state_of(value, data, [(int(i), j) for i in rows_of(data, j) if int(i) not in hidden])
        for j in range(len(data.models))
    ]
    better, worse = [], []
    for i, a, b, moved in pairs:
        at = [float(states[j].predict_vectors(data.vectors[[i]]).mean[0]) for j in (a, b)]
        better.append(at[1] if moved > 0 else at[0])
        worse.append(at[0] if moved > 0 else at[1])
    return {
        "pairs": len(pairs),
        "ranking": round(pair_accuracy(np.array(better), np.array(worse)), 4),
        "prompt_only_ranking": 0.5,
    }


def main() -> None:
    """Measure and record."""
    began = time.process_time()
    data = load("v0_sample", complete=False)
    rng = np.random.default_rng(0)
    table, noise_rows = real(data), []
    for column, info in enumerate(data.models):
        order = rng.permutation(rows_of(data, column))
        rates = data.table.rates[:, column]
        half = len(order) // 2
        noise_rows += simulated(info["name"], rates[order[:half]], rates[order[half:]], rng)
    gains = np.array([row["vs_uniform"] for row in table])
    posterior = np.array([row[f"posterior_{sd}"] for row in noise_rows for sd in (0.1, 0.2, 0.3)])
    cases = practice_cases(data)
    plans = practised(cases)
    figures = {
        "rollouts_per_full_mixed_group": plans["text_probe"]["rollouts_per_full_mixed_group"],
        "useful_rollouts": plans["text_probe"]["useful_rollouts"],
        "saved_against_dynamic": plans["text_probe"]["saved_against_dynamic"],
        "saved_ci": plans["text_probe"]["saved_ci"],
        "useful_ci": plans["text_probe"]["useful_ci"],
        "variance_against_dynamic": plans["text_probe"]["variance_against_dynamic"],
        "variance_ci": plans["text_probe"]["variance_ci"],
        "plans": plans,
        "variance_against_uniform": spread_out(cases),
        "select_by_history": by_history(data),
        "worst_vs_uniform": float(gains.min()),
        "mean_vs_uniform": round(float(gains.mean()), 5),
        "cases": len(gains),
        "by_setting": {
            setting: {
                "worst": float(min(g)),
                "mean": round(float(np.mean(g)), 5),
            }
            for setting in ("within", "earlier", "revisited")
            if (g := [r["vs_uniform"] for r in table if r["setting"].startswith(setting)])
        },
        "guard_held": int(sum(row["guard_held"] for row in table)),
        "known_noise_worst": float(posterior.min()),
        "known_noise_mean": round(float(posterior.mean()), 5),
        "shifted_pairs": shifted_pairs(data),
        "rows": table,
        "known_noise_rows": noise_rows,
        "cpu_s": round(time.process_time() - began, 1),
    }
    record("routing_budget", figures, "python -m tests.benchmarks.routing.routing_budget")


if __name__ == "__main__":
    main()
