"""TRL's own trainer and ours on identical completions and rewards: advantages, loss, gradients.

On a tiny model in float32 on CPU; skipped where TRL is not installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.rl.tiny import tiny_hf
from tfgrpo.rl.formulas.advantages import ADVANTAGES
from tfgrpo.rl.formulas.inputs import RewardBatch
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.model.decoder import decoder_from_hf, hf_slices
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.update.accumulate import TrainRow, UpdateSettings, accumulate

trl = pytest.importorskip("trl", reason="TRL is not installed")
pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]

REWARDS = [1.0, 0.0, 0.5, 0.0, 2.0, 2.0, 2.0, -1.0]
GROUP = 4


def completions() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randint(3, 64, (n,), generator=generator).tolist() for n in (3, 7, 1, 5, 6, 2, 7, 4)
    ]


def trl_batch(tmp_path: Any, **options: Any) -> tuple[Any, Any, dict[str, Any], list[int]]:
    """TRL's trainer, its model, its scored batch for the fixed completions, and a prompt's ids."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(94 + i): i for i in range(3, 64)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")
    model = tiny_hf()
    args = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=GROUP,
        max_completion_length=7,
        beta=0.0,
        report_to="none",
        use_cpu=True,
        bf16=False,
        temperature=1.0,
        gradient_checkpointing=False,
        **options,
    )
    rewards = iter(REWARDS)
    table = InMemoryTable.from_pydict({"prompt": ["abc", "defgh"]})

    def reward(completion_ids: Any, **_: Any) -> list[float]:
        return [next(rewards) for _ in completion_ids]

    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset(table, fingerprint="tiny"),
        processing_class=tokenizer,
    )
    trainer._generate_single_turn = lambda *_, **__: (completions(), None)
    trainer.current_gradient_accumulation_steps = 1
    rows = [{"prompt": "abc"}] * GROUP + [{"prompt": "defgh"}] * GROUP
    return (
        trainer,
        trainer.model,
        trainer._generate_and_score_completions(rows),
        [
            tokenizer("abc")["input_ids"],
            tokenizer("defgh")["input_ids"],
        ],
    )


def our_rows(prompts: list[Any], advantage_R: Any, old: Any = None) -> list[TrainRow]:
    return [
        TrainRow(
            Row(i, tuple(prompts[i // GROUP]), tuple(ids)),
            float(advantage_R[i]),
            group=i // GROUP,
            old_logp=None if old is None else tuple(old[i][: len(ids)].tolist()),
        )
        for i, ids in enumerate(completions())
    ]


def our_advantages() -> Any:
    batch = RewardBatch(
        np.array(REWARDS), np.repeat([0, 1], GROUP), np.array([len(c) for c in completions()])
    )
    return ADVANTAGES["grpo"].fn(batch)


def test_advantages_equal_trl(tmp_path) -> None:
    _, _, batch, _ = trl_batch(tmp_path)
    np.testing.assert_allclose(our_advantages(), batch["advantages"].numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("theirs", "loss", "options", "aggregation"),
    [
        ({"loss_type": "dapo"}, "clip", {}, "token_mean"),
        ({"loss_type": "dapo", "epsilon_high": 0.28}, "clip", {"eps_high": 0.28}, "token_mean"),
        ({"loss_type": "grpo"}, "clip", {}, "row_mean"),
        ({"loss_type": "dr_grpo"}, "clip", {}, "fixed_length"),
        ({"loss_type": "cispo", "epsilon_high": 1.3}, "cispo", {"eps_max": 1.3}, "token_mean"),
        ({"loss_type": "sapo"}, "sapo", {}, "row_mean"),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            "gspo",
            {"eps_low": 0.2, "eps_high": 0.2},
            "row_mean",
        ),
    ],
)
@pytest.mark.parametrize("is_on_policy", [True, False])
def test_loss_and_gradients_equal_trl(
    tmp_path, theirs, loss, options, aggregation, is_on_policy
) -> None:
    from tfgrpo.rl.formulas.aggregations import AGGREGATIONS

    if loss not in LOSSES or aggregation not in AGGREGATIONS:
        pytest.fail(f"the registry has no {loss!r} or no {aggregation!r}")
    trainer, model, batch, prompts = trl_batch(tmp_path, **theirs)
    old = None
    if not is_on_policy:
        noise = torch.Generator().manual_seed(9)
        with torch.no_grad():
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            logps, *_ = trainer._get_per_token_logps_and_entropies(
                model, ids, mask, batch["completion_ids"].shape[1]
            )
        old = logps + 0.3 * torch.randn(logps.shape, generator=noise)
        batch["old_per_token_logps"] = old
    model.train()
    want = trainer._compute_loss(model, batch)
    model.zero_grad()
    want.backward()

    decoder = decoder_from_hf(tiny_hf(), share=False)
    settings = UpdateSettings(
        loss=loss, options=options, aggregation=aggregation, max_tokens=7, micro_batch_tokens=12
    )
    got = accumulate(decoder, our_rows(prompts, our_advantages(), old), settings)
    assert got.loss == pytest.approx(want.item(), rel=1e-4, abs=1e-5)
    own, peers = dict(decoder.named_parameters()), dict(model.named_parameters())
    for name, ours, first, last in hf_slices(decoder.shape):
        torch.testing.assert_close(
            own[ours].grad[first:last], peers[name].grad, rtol=2e-3, atol=2e-5, msg=name
        )
