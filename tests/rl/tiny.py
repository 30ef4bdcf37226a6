"""A random two-layer Llama and rows of random tokens, the common material of these tests."""

from __future__ import annotations

from typing import Any

import torch

from tfgrpo.rl.model import Decoder, decoder_from_hf
from tfgrpo.rl.packing import Row


def tiny_hf(
    *, kind: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, vocab: int = 64
) -> Any:
    """A Hugging Face causal LM with two layers and four heads on two key-value heads."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": kind != "mistral",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}[kind]
    if kind == "qwen3":
        sizes["head_dim"] = 16
    if kind == "mistral":
        sizes["sliding_window"] = None
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tiny_decoder(**options: Any) -> Decoder:
    """The same model as a `Decoder`."""
    return decoder_from_hf(tiny_hf(**options))


def random_rows(
    n_groups: int = 3, group_size: int = 3, *, seed: int = 0, vocab: int = 64
) -> list[Row]:
    """Rows of random lengths; the rows of a group share a prompt."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocab, (n,), generator=generator).tolist())

    def length() -> int:
        return int(torch.randint(1, 9, (), generator=generator))

    rows = []
    for _ in range(n_groups):
        prompt = ids(length())
        for _ in range(group_size):
            rows.append(Row(len(rows), prompt, ids(length())))
    return rows
