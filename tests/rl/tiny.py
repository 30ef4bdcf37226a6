"""Small random models and rows of random tokens, the common material of these tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tfgrpo.rl import LoadedModel
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.model.decoder import Decoder, decoder_from_hf
from tfgrpo.rl.model.packing import Row
from tfgrpo.rollout import Rollout, Score, Task


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


def big_hf(kind: str = "llama", **sizes: Any) -> Any:
    """A causal LM on the GPU. Head size 64, groups of 3 queries: shapes that kernels are for."""
    import transformers

    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    options = {
        "vocab_size": 5000,
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 2,
        **sizes,
    }
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    return model.to("cuda", torch.bfloat16).eval()


class CharTokenizer:
    """One token a character; ids 0 to 2 are special. Has the calls that `rl` makes."""

    chat_template: str | None = "yes"
    eos_token_id = 2

    def apply_chat_template(
        self, turns: Any, *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert add_generation_prompt and not tokenize
        return "".join(f"<{t['content']}>" for t in turns)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [3 + ord(c) % 61 for c in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(61 + i) for i in ids if i > 2 or not skip_special_tokens)

    def save_pretrained(self, folder: Any) -> None:
        (folder / "tokenizer.json").write_text("{}")


class EvenTokens:
    """Reward: the share of even token ids in the reply."""

    verifier_id = "even-tokens"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        """Every task will do."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        ids = rollout.steps[-1].token_ids or ()
        return Score(sum(i % 2 == 0 for i in ids) / max(1, len(ids)))


def tiny_parts(**options: Any) -> LoadedModel:
    """Model and tokenizer for a `Trainer`."""
    model = tiny_hf(**options)
    return LoadedModel(
        decoder=decoder_from_hf(model),
        tokenizer=CharTokenizer(),
        save_extras=lambda folder: model.config.save_pretrained(folder),
        eos_ids=(2,),
        name="tiny",
    )


def big_parts() -> LoadedModel:
    """The model on the GPU, with the tiny one's tokenizer."""
    model = big_hf()
    return replace(
        tiny_parts(),
        decoder=decoder_from_hf(model),
        save_extras=lambda folder: model.config.save_pretrained(folder),
    )


def tiny_tasks(n: int = 6, prefix: str = "t") -> list[Task]:
    return [Task(f"{prefix}{i}", f"task {chr(97 + i)}") for i in range(n)]


def tiny_config(folder: Any, **sections: dict[str, Any]) -> TrainConfig:
    """Fast settings; sections override single keys."""
    base: dict[str, dict[str, Any]] = {
        "rollout": {"tasks_per_step": 3, "group_size": 4, "max_tokens": 8, "max_rows": 8},
        "optimiser": {"steps": 4, "lr": 1e-2, "micro_batch_tokens": 64, "vocabulary_chunk": 32},
        "run": {"folder": str(folder), "save_every": 2},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return TrainConfig.from_mapping(base)
