"""Adapters trained through merged weights have autograd's own gradients."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.rl.tiny import random_rows, tiny_decoder, tiny_hf
from tests.rl.update.test_accumulate import train_rows
from tfgrpo.errors import ConfigError
from tfgrpo.rl.checkpoints.export import write_adapters
from tfgrpo.rl.model.decoder import decoder_from_hf, hf_slices
from tfgrpo.rl.optim.adamw import AdamSettings, AdamW
from tfgrpo.rl.optim.lora import LoraWeights
from tfgrpo.rl.update.accumulate import UpdateSettings, accumulate


def test_projected_gradients_equal_autograd_through_a_and_b() -> None:
    decoder = tiny_decoder()
    weights = LoraWeights(decoder, rank=3, alpha=6.0, targets=("q_proj", "down_proj"), seed=1)
    generator = torch.Generator().manual_seed(0)
    for name, master in weights.masters().items():
        if "lora_B" in name:
            master.high.normal_(0, 0.1, generator=generator)
    weights.publish()
    rows = train_rows(random_rows())
    accumulate(decoder, rows, UpdateSettings())
    got = weights.gradients()

    plain = tiny_decoder()
    leaves = {n: m.value().clone().requires_grad_() for n, m in weights.masters().items()}
    own = dict(plain.named_parameters())
    merged = {n: p.detach().clone() for n, p in own.items()}
    for theirs, ours, first, last in hf_slices(plain.shape):
        module = theirs.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in leaves:
            continue
        delta = 2.0 * leaves[f"{module}.lora_B.weight"] @ leaves[f"{module}.lora_A.weight"]
        pieces = [merged[ours][:first], merged[ours][first:last] + delta, merged[ours][last:]]
        merged[ours] = torch.cat(pieces)

    class Loss(torch.nn.Module):
        def forward(self):
            from tfgrpo.rl.model.packing import pack

            packed = pack([r.row for r in rows])
            hidden = plain(packed)[packed.head_D]
            logp = (hidden @ plain.embed.t()).log_softmax(-1)
            logp = logp.gather(-1, packed.target_D[:, None]).squeeze(-1)
            adv = torch.tensor(np.repeat([r.advantage for r in rows], [r.row.n_loss for r in rows]))
            return -(logp * adv).sum() / len(logp)

    module = Loss()
    module.plain = plain
    named = {f"plain.{n}": t for n, t in merged.items()}
    torch.func.functional_call(module, named, ()).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(got[name], leaf.grad.float(), rtol=1e-3, atol=1e-5, msg=name)


def test_only_adapters_move_and_the_merged_weights_follow() -> None:
    decoder = tiny_decoder()
    before = {n: p.detach().clone() for n, p in decoder.named_parameters()}
    weights = LoraWeights(decoder, rank=2, targets=("v_proj",))
    optimiser = AdamW(weights, AdamSettings())
    accumulate(decoder, train_rows(random_rows()), UpdateSettings())
    optimiser.step(1e-2)
    kv = decoder.shape.q_size + decoder.shape.kv_size
    for name, parameter in decoder.named_parameters():
        if name.endswith("qkv"):
            assert torch.equal(parameter[:kv], before[name][:kv])
            assert not torch.equal(parameter[kv:], before[name][kv:])
        else:
            assert torch.equal(parameter, before[name]), name


@pytest.mark.filterwarnings("ignore::FutureWarning")  # between peft and transformers
def test_exported_adapters_load_in_peft_and_give_the_merged_logits(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_hf()
    decoder = decoder_from_hf(model, share=False)
    weights = LoraWeights(decoder, rank=2, targets=("q_proj", "up_proj"))
    optimiser = AdamW(weights, AdamSettings())
    accumulate(decoder, train_rows(random_rows()), UpdateSettings())
    optimiser.step(1e-2)
    write_adapters(tmp_path, weights, "tiny")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 2
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    from tests.rl.model.test_decoder import naive_logps
    from tfgrpo.rl.update.accumulate import score_rows

    row = random_rows()[0]
    want = naive_logps(adapted, row).tolist()
    got = score_rows(decoder, [row], temperature=1.0, max_tokens=99)[0]
    assert got == pytest.approx(want, abs=1e-4)


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"targets \['wq'\] among q_proj"):
        LoraWeights(tiny_decoder(), targets=("wq",))
