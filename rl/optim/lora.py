"""Low-rank adapters, trained through the merged weights.

The model always runs on W + s·B·A, the very weights that the generator samples from, so merging
never rounds differently in the two. The accumulated gradient G of the merged matrix gives
∂A = s·Bᵀ·G and ∂B = s·G·Aᵀ exactly, since A and B stay fixed within an optimiser batch. The price
is a full gradient of each adapted matrix in float32, the gain one code path and no mismatch.

Does not know losses. Source: LoRA (arXiv 2106.09685); training through the merged weights is own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tfgrpo.errors import ConfigError
from tfgrpo.rl import distributed
from tfgrpo.rl.model.decoder import Decoder, hf_slices
from tfgrpo.rl.model.grad_buffers import GradientSums
from tfgrpo.rl.optim.master_weights import Master

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraWeights:
    """Adapters of rank r on the named projections; everything else is frozen.

    Args:
        decoder: its adapted parameters are overwritten by `publish`.
        rank: of the adapters, 1 or more.
        alpha: s = alpha / rank.
        targets: names among `TARGETS`.
        seed: fixes the start of A (uniform, as in the paper's code); B starts at 0.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        rank: int = 16,
        alpha: float = 32.0,
        targets: tuple[str, ...] = TARGETS,
        seed: int = 0,
    ) -> None:
        unknown = set(targets) - set(TARGETS)
        if rank < 1 or unknown or not targets:
            raise ConfigError(
                f"lora: rank {rank} must be at least 1 and targets {list(targets)} among "
                f"{', '.join(TARGETS)}"
            )
        self.is_sharded = False
        self.rank, self.alpha, self.targets = rank, alpha, targets
        self.scale = alpha / rank
        self._decoder = decoder
        self._at: dict[str, tuple[str, int, int]] = {}
        self._base: dict[str, Tensor] = {}
        self._masters: dict[str, Tensor] = {}
        own = dict(decoder.named_parameters())
        for parameter in own.values():
            parameter.requires_grad_(False)
        draw = torch.Generator().manual_seed(seed)
        for theirs, ours, first, last in hf_slices(decoder.shape):
            module = theirs.removesuffix(".weight")
            if not theirs.endswith(".weight") or module.rsplit(".", 1)[-1] not in targets:
                continue
            weight = own[ours].detach()[first:last]
            self._at[module] = (ours, first, last)
            self._base[module] = weight.float().clone()
            bound = 1 / math.sqrt(weight.shape[1])
            a = torch.empty(rank, weight.shape[1]).uniform_(-bound, bound, generator=draw)
            self._masters[f"{module}.lora_A.weight"] = a.to(weight.device)
            self._masters[f"{module}.lora_B.weight"] = weight.new_zeros(
                weight.shape[0], rank, dtype=torch.float32
            )
        adapted = {ours: own[ours] for ours, _, _ in self._at.values()}
        for parameter in adapted.values():
            parameter.requires_grad_(True)
        self._sums = GradientSums(adapted)

    def masters(self) -> Mapping[str, Master]:
        """A and B of every adapted projection, under PEFT's module names."""
        return {name: Master(t) for name, t in self._masters.items()}

    def gradients(self) -> Mapping[str, Tensor]:
        """Project the merged matrices' gradients onto A and B."""
        found: dict[str, Tensor] = {}
        for module, (ours, first, last) in self._at.items():
            gradient = self._sums.by_name[ours][first:last]
            a = self._masters[f"{module}.lora_A.weight"]
            b = self._masters[f"{module}.lora_B.weight"]
            found[f"{module}.lora_A.weight"] = self.scale * (b.t() @ gradient)
            found[f"{module}.lora_B.weight"] = self.scale * (gradient @ a.t())
        return found

    def average(self) -> None:
        """One reduction of the adapted matrices' sums."""
        distributed.average([self._sums.memory])

    def publish(self) -> None:
        """Write W + s·B·A into the decoder."""
        own = dict(self._decoder.named_parameters())
        with torch.no_grad():
            for module, (ours, first, last) in self._at.items():
                a = self._masters[f"{module}.lora_A.weight"]
                b = self._masters[f"{module}.lora_B.weight"]
                own[ours][first:last] = self._base[module] + self.scale * (b @ a)

    def clear(self) -> None:
        """Zero the sums."""
        self._sums.clear()

    def spare(self) -> Tensor:
        """Memory of the adapted matrices' sums."""
        return self._sums.memory

    def peft_config(self, base_model: str) -> dict[str, object]:
        """Return what PEFT expects in `adapter_config.json`."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(self.targets),
            "bias": "none",
            "inference_mode": True,
        }
