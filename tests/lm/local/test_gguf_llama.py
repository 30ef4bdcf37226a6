"""A GGUF written as a transformers folder, beside transformers' own loader."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tfgrpo.errors import ConfigError
from tfgrpo.lm.local.gguf_llama import write_folder

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 64, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = ("an error", "  two\n\nlines\t", "1234.5€ naïve 漢字", "<|im_start|>user\nHi<|im_end|>\n")


def tiny_gguf(path: Path, *, tied: bool, architecture: str = "llama") -> Path:
    """Write a Llama of random weights, Q4_1, Q8_0 and float32, with a byte-level tokenizer."""
    from tokenizers import pre_tokenizers

    rng = torch.Generator().manual_seed(3)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["e r", "er r", "o r", "err or", "Ġ error"]
    tokens = [*SPECIAL, *alphabet, *(m.replace(" ", "") for m in merges)]
    tokens += [f"<extra_{i}>" for i in range(288 - len(tokens))]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    narrow = WIDTH * KV_HEADS // HEADS
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (WIDTH,),
            f"blk.{i}.attn_q": (WIDTH, WIDTH),
            f"blk.{i}.attn_k": (narrow, WIDTH),
            f"blk.{i}.attn_v": (narrow, WIDTH),
            f"blk.{i}.attn_output": (WIDTH, WIDTH),
            f"blk.{i}.ffn_norm": (WIDTH,),
            f"blk.{i}.ffn_gate": (96, WIDTH),
            f"blk.{i}.ffn_up": (96, WIDTH),
            f"blk.{i}.ffn_down": (WIDTH, 96),
        }
    if not tied:
        shapes["output"] = (len(tokens), WIDTH)
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=rng).numpy()
        kind = gguf.GGMLQuantizationType.Q4_1
        if name == "token_embd":
            kind = gguf.GGMLQuantizationType.Q8_0
        if len(shape) == 1:
            kind = gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_json(tokenizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return found


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_folder_is_what_transformers_makes_of_the_file(tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("accelerate", reason="transformers' GGUF loader needs accelerate")
    source = tiny_gguf(tmp_path / "tiny.gguf", tied=tied)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(source, folder)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path),
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weights, expected = ours.state_dict(), peer.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    unequal = {
        name
        for name, value in peer.config.to_dict().items()
        if ours.config.to_dict().get(name) != value
    }
    assert unequal <= {"_name_or_path", "architectures", "quantization_config", "unk_token_id"}
    ids = torch.tensor([[1, 20, 33, 7]])
    assert torch.equal(ours(ids).logits, peer(ids).logits)

    peer_tokens = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=source.name)
    our_tokens = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer_json(our_tokens) == tokenizer_json(peer_tokens)
    assert our_tokens.special_tokens_map == peer_tokens.special_tokens_map
    assert our_tokens.chat_template == peer_tokens.chat_template
    for text in TEXTS:
        assert our_tokens(text).input_ids == peer_tokens(text).input_ids
        assert our_tokens.decode(our_tokens(text).input_ids) == text


def test_a_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    source = tiny_gguf(tmp_path / "other.gguf", tied=True, architecture="gemma3")
    with pytest.raises(ConfigError, match="gemma3"):
        write_folder(source, tmp_path)


@pytest.mark.real
def test_the_embedded_models_folder_holds_what_transformers_5_24_makes_of_its_file() -> None:
    from safetensors import safe_open

    from tfgrpo.errors import MissingExtraError
    from tfgrpo.lm.local.embedded import embedded_folder

    try:
        folder = embedded_folder()
    except MissingExtraError as exc:
        pytest.skip(str(exc))
    digest = hashlib.sha256()
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = sorted(weights.keys())
        for name in names:
            values = weights.get_tensor(name)
            digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
            digest.update(values.view(torch.int16).numpy().tobytes())
    assert len(names) == 272
    assert digest.hexdigest() == WEIGHTS
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = json.dumps(tokenizer_json(tokenizer), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == TOKENIZER
    assert hashlib.sha256(tokenizer.chat_template.encode()).hexdigest() == TEMPLATE


WEIGHTS = "2ef8c72b1f985bfb578dab81ed16dd67a3a574c9bd593585fd27550eeefad146"
TOKENIZER = "7ac55059a82b22649ba752d422d8a437a79c62ee85046d1605cac6e2bb954c42"
TEMPLATE = "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"
"""Of the folder that transformers 5.24 with accelerate 1.15 writes from the same GGUF."""
