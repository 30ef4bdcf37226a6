"""verl's own estimators and losses on identical inputs: equal values and gradients.

verl's one file of formulas is executed as it is, with its imports replaced by stand-ins, since the
package needs a cluster's dependencies. `make test` installs it without them; skipped where it is
absent.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tfgrpo.rl.formulas.advantages import ADVANTAGES
from tfgrpo.rl.formulas.aggregations import AGGREGATIONS
from tfgrpo.rl.formulas.credit import CREDIT
from tfgrpo.rl.formulas.inputs import RewardBatch, TokenBatch
from tfgrpo.rl.formulas.losses import LOSSES

VERL = Path(sys.prefix) / "peers" / "verl" / "verl"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not VERL.is_dir(), reason=f"verl is not in {VERL.parent}"),
]

LENGTHS = [4, 1, 6, 3, 5, 2]
GROUPS = np.array([0, 0, 0, 1, 1, 1])
REWARDS = np.array([1, 0, 0.25, 0, 1, 0.5])
GREEDY = np.array([0.5, 0.5, 0.5, 0.2, 0.2, 0.2])
ADVANTAGE = torch.tensor([1.3, -0.7, 0.4, -1.5, 0.2, 0.9], dtype=torch.float64)
LENGTH = torch.tensor(LENGTHS)
MASK = (torch.arange(max(LENGTHS))[None, :] < LENGTH[:, None]).to(torch.float64)
KEEP = MASK.bool()


class Settings(SimpleNamespace):
    """verl's configuration objects: attributes and `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@pytest.fixture(scope="module")
def verl() -> Iterator[ModuleType]:
    """The module `verl.trainer.ppo.core_algos`."""
    functional = ModuleType("verl.utils.torch_functional")
    text = (VERL / "utils" / "torch_functional.py").read_text(encoding="utf-8")
    names = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
    found = [re.search(rf"^def {n}\(.*?(?=^\S|\Z)", text, re.S | re.M) for n in names]
    source = "\n".join(m.group(0) for m in found if m)
    vars(functional)["torch"] = torch
    exec(
        compile("from __future__ import annotations\n" + source, "masked", "exec"), vars(functional)
    )

    def stand_in(name: str, **members: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(members)
        return module

    def unchanged(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda f: f

    class AlgoConfig:
        """Nothing here is one."""

    utils = stand_in(
        "verl.utils", torch_functional=functional, as_torch_index=None, group_mean_std=None
    )
    modules = {
        "omegaconf": stand_in("omegaconf", DictConfig=dict),
        "verl": stand_in("verl", utils=utils),
        "verl.utils": utils,
        "verl.utils.torch_functional": functional,
        "verl.utils.import_utils": stand_in("verl.utils.import_utils", deprecated=unchanged),
        "verl.trainer": stand_in("verl.trainer"),
        "verl.trainer.config": stand_in("verl.trainer.config", AlgoConfig=AlgoConfig),
        "verl.workers": stand_in("verl.workers"),
        "verl.workers.config": stand_in("verl.workers.config", ActorConfig=Settings),
    }
    spec = importlib.util.spec_from_file_location(
        "verl_core_algos", VERL / "trainer" / "ppo" / "core_algos.py"
    )
    assert spec is not None and spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        spec.loader.exec_module(core)
        yield core
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def token_rewards() -> torch.Tensor:
    """Each row's outcome on its last token."""
    table = torch.zeros(MASK.shape, dtype=torch.float64)
    table[torch.arange(len(LENGTHS)), LENGTH - 1] = torch.from_numpy(REWARDS)
    return table


def logps() -> tuple[torch.Tensor, torch.Tensor]:
    """(log π, log π_old), all below 0."""
    draw = torch.Generator().manual_seed(0)
    old = -torch.rand(MASK.shape, generator=draw, dtype=torch.float64) * 2 - 0.1
    noise = torch.randn(MASK.shape, generator=draw, dtype=torch.float64)
    return (old + 0.4 * noise).clamp(max=-0.01), old


ESTIMATORS = {
    "grpo": ("compute_grpo_outcome_advantage", (GROUPS,), {"eps": 1e-6}),
    "rloo": ("compute_rloo_outcome_advantage", (GROUPS,), {}),
    "opo": ("compute_opo_outcome_advantage", (GROUPS,), {}),
    "gpg": ("compute_gpg_outcome_advantage", (GROUPS,), {}),
    "pass_at_k": ("compute_grpo_passk_outcome_advantage", (GROUPS,), {}),
    "reinforce_pp": ("compute_reinforce_plus_plus_outcome_advantage", (), {}),
    "reinforce_pp_baseline": (
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        (GROUPS,),
        {},
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_equal_verls(verl: Any, name: str) -> None:
    function, arguments, options = ESTIMATORS[name]
    settings = Settings(gamma=1.0, norm_adv_by_std_in_grpo=True)
    table, _ = getattr(verl, function)(token_rewards(), MASK, *arguments, config=settings)
    batch = RewardBatch(REWARDS, GROUPS, np.array(LENGTHS))
    found = ADVANTAGES[name].fn(batch, **options)
    assert found.tolist() == pytest.approx(table[:, 0].tolist(), abs=1e-8)
    assert np.abs(found).max() > 0.1


def test_remax_and_the_optimal_token_baseline_equal_verls(verl: Any) -> None:
    table, _ = verl.compute_remax_outcome_advantage(token_rewards(), torch.from_numpy(GREEDY), MASK)
    batch = RewardBatch(REWARDS, GROUPS, np.array(LENGTHS), baseline_R=GREEDY)
    assert ADVANTAGES["remax"].fn(batch).tolist() == pytest.approx(table[:, 0].tolist())
    _, old = logps()
    square = 0.5 + 0.3 * torch.rand(
        MASK.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    theirs, _ = verl.compute_optimal_token_baseline_advantage(
        token_rewards(), MASK, GROUPS, old, square
    )
    batch = RewardBatch(
        REWARDS,
        GROUPS,
        np.array(LENGTHS),
        logp_D=old[KEEP].numpy(),
        extra={"sum_square_D": square[KEEP].numpy()},
    )
    found = CREDIT["optimal_token_baseline"].fn(batch)
    assert found.tolist() == pytest.approx(theirs[KEEP].tolist(), abs=1e-10)


EPS = {"eps_low": 0.2, "eps_high": 0.28}
COV = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0}
TV = {"d_low": 0.2, "d_high": 0.28}
KL = {"d_low": 0.02, "d_high": 0.03}
LOSS_CASES = {
    # name: (our loss, its options, our aggregation, verl's loss, its aggregation, its settings)
    "clip": ("clip", EPS, "token_mean", "vanilla", "token-mean", {"clip_ratio_c": 1e9}),
    "by rows": ("clip", EPS, "row_mean", "vanilla", "seq-mean-token-mean", {"clip_ratio_c": 1e9}),
    "summed": ("clip", EPS, "row_sum", "vanilla", "seq-mean-token-sum", {"clip_ratio_c": 1e9}),
    "dual clip": ("dual_clip", EPS | {"c": 1.5}, "token_mean", "vanilla", "token-mean",
                  {"clip_ratio_c": 1.5}),
    "gspo": ("gspo_token", EPS, "row_mean", "gspo", "seq-mean-token-mean", {}),
    "sapo": ("sapo", {}, "row_mean", "sapo", "seq-mean-token-mean", {}),
    "gmpo": ("gmpo", EPS, "row_mean", "geo_mean", "", {}),
    "dro": ("dro", {"beta": 0.3}, "token_mean", "dro", "token-mean", {"dro_beta": 0.3}),
    "gpg": ("reinforce", {}, "token_mean", "gpg", "token-mean", {}),
    "dppo tv": ("dppo_tv", TV, "token_mean", "dppo_tv", "token-mean", {"clip_ratio_c": 20.0}),
    "dppo kl": ("dppo_kl", KL, "token_mean", "dppo_kl", "token-mean",
                {"clip_ratio_c": 20.0, "clip_ratio_low": 0.02, "clip_ratio_high": 0.03}),
    "kl cov": ("kl_cov", {"share": 0.2}, "token_mean", "kl_cov", "token-mean",
               {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}),
    # a share of 1 takes every candidate, so that the random draw does not matter
    "clip cov": ("clip_cov", EPS | {"share": 1.0, "cov_low": 0.05}, "token_mean", "clip_cov",
                 "token-mean", COV),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSS_CASES)
def test_losses_and_gradients_equal_verls(verl: Any, case: str) -> None:
    """One group makes the whole batch, since covariances are the micro-batch's there."""
    loss, options, aggregation, name, their_aggregation, changes = LOSS_CASES[case]
    new, old = logps()
    settings = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "global_batch_info": {},
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        **changes,
    }
    config = Settings(**settings, policy_loss=Settings(**settings))
    leaf = new.clone().requires_grad_()
    spread = ADVANTAGE[:, None].expand(MASK.shape) * MASK
    theirs, _ = verl.get_policy_loss_fn(name)(
        old, leaf, spread, MASK, loss_agg_mode=their_aggregation, config=config
    )
    (their_grad,) = torch.autograd.grad(theirs, leaf)

    mine = new[KEEP].clone().requires_grad_()
    batch = TokenBatch(
        logp_D=mine,
        old_logp_D=old[KEEP],
        advantage_D=ADVANTAGE.repeat_interleave(LENGTH),
        row_D=torch.arange(len(LENGTHS)).repeat_interleave(LENGTH),
        n_rows=len(LENGTHS),
        group_R=torch.zeros(len(LENGTHS), dtype=torch.int64),
    )
    weight_R = AGGREGATIONS[aggregation].fn(np.array(LENGTHS), max_tokens=8)
    weight_D = torch.from_numpy(weight_R).repeat_interleave(LENGTH)
    ours = (LOSSES[loss].fn(batch, **options) * weight_D).sum()
    (our_grad,) = torch.autograd.grad(ours, mine)
    assert ours.detach().item() == pytest.approx(theirs.detach().item(), abs=1e-7)
    assert their_grad.abs().max() > 1e-2
    torch.testing.assert_close(our_grad, their_grad[KEEP], rtol=1e-7, atol=1e-8)
