"""A Llama GGUF with a byte-level BPE tokenizer, written as the folder that transformers loads.

De-quantised by `gguf` and rounded to bfloat16 tensor by tensor. What comes out equals what
transformers' own GGUF loader makes of the file, which needs `accelerate` and five times as long.

Does not know where the file comes from or where the folder stays. Source: the layout of llama.cpp's
`convert_hf_to_gguf.py` (names; query and key rows interleaved per rotary pair) and the file formats
of safetensors, tokenizers and transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfgrpo.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    import torch

_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_CONTROL = 3
"""The token type of a token that stands for no text."""

Field = Callable[[str], Any]


def write_folder(source: Path, folder: Path) -> None:
    """Write weights (bfloat16), config, tokenizer and chat template of a GGUF into a folder.

    Raises:
        MissingExtraError: gguf, torch or safetensors is not installed.
        ConfigError: the file is no Llama with a byte-level BPE tokenizer.
    """
    try:
        from gguf import GGUFReader  # type: ignore[import-untyped,unused-ignore]
        from safetensors.torch import save_file
    except ImportError as exc:
        raise MissingExtraError.of("local", "the embedded model", exc.name or "gguf") from exc
    reader = GGUFReader(source)

    def field(name: str) -> Any:
        found = reader.get_field(name)
        return None if found is None else found.contents()

    kinds = (field("general.architecture"), field("tokenizer.ggml.model"))
    if kinds != ("llama", "gpt2"):
        raise ConfigError(f"{source}: a Llama with a gpt2 tokenizer is needed, this has {kinds}")
    weights = _weights(reader.tensors, field)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tied = "lm_head.weight" not in weights
    (folder / "chat_template.jinja").write_text(field("tokenizer.chat_template"), encoding="utf-8")
    for name, content in {
        "config.json": _config(field, tied=tied),
        "generation_config.json": _special_ids(field),
        "tokenizer.json": _tokenizer(field),
        "tokenizer_config.json": _tokenizer_config(field),
    }.items():
        text = json.dumps(content, ensure_ascii=False, indent=2)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def _weights(tensors: Any, field: Field) -> dict[str, torch.Tensor]:
    import torch
    from gguf import dequantize

    heads = {
        "attn_q": field("llama.attention.head_count"),
        "attn_k": field("llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in tensors:
        stem = tensor.name.removesuffix(".weight")
        kind = stem.rpartition(".")[2]
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16)
        if kind in heads:
            # llama.cpp turns neighbouring pairs, transformers the two halves of a head.
            pairs = values.view(heads[kind], -1, 2, values.shape[1])
            values = pairs.transpose(1, 2).reshape(values.shape)
        name = _OUTSIDE.get(stem) or f"model.layers.{stem.split('.')[1]}.{_IN_LAYER[kind]}"
        weights[f"{name}.weight"] = values.contiguous()
    return weights


def _special_ids(field: Field) -> dict[str, int]:
    return {
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


def _config(field: Field, *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.rope.dimension_count"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "tie_word_embeddings": tied,
        **_special_ids(field),
    }


def _tokenizer(field: Field) -> dict[str, Any]:
    tokens = field("tokenizer.ggml.tokens")
    types = field("tokenizer.ggml.token_type")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, **plain, "special": True}
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _CONTROL
        ],
        "pre_tokenizer": {**byte_level, "add_prefix_space": False},
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [pair.split(" ") for pair in field("tokenizer.ggml.merges")],
        },
    }


def _tokenizer_config(field: Field) -> dict[str, Any]:
    tokens = field("tokenizer.ggml.tokens")
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{k}_token": tokens[field(f"tokenizer.ggml.{v}_token_id")] for k, v in kinds.items()},
    }
