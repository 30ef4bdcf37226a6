"""An engine beside a trainer: a tiny model with weights of its own, handed over by `sync`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.rl.tiny import tiny_parts
from tfgrpo.protocols import Generated, Sampling
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.model.decoder import load_hf_weights

AHEAD = {"kind": "vllm-server", "max_staleness": 1}
"""Section [engine] of a run that samples the next step while it trains one."""


class Engine:
    """Samples from the weights that it was handed last; keeps what happened in `told`."""

    def __init__(self) -> None:
        parts = tiny_parts()
        self._decoder = parts.decoder
        self._own = GroupGenerator(
            parts.decoder, eos_ids=(2,), detokenize=parts.text_of, max_rows=8
        )
        self.told: list[str] = []

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Generated]]:
        self.told.append("begin")
        made = self._own.generate(token_ids, n, sampling, seeds)
        self.told.append("end")
        return made

    def sync(self, named_params: Mapping[str, Any]) -> None:
        self.told.append("sync")
        load_hf_weights(self._decoder, named_params)
