"""`rl`: a tiny model is trained for two steps, with TensorBoard's log beside it."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(62 + i): i for i in range(3, 64)}}
core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")
tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True,
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained("model")
tokenizer.save_pretrained("model")
rows = [{"task_id": f"t{i}", "prompt": "abc" + chr(97 + i), "reference": "a"} for i in range(4)]
Path("tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
Path("train.toml").write_text(
    f"""
[model]
lm = "local:{Path("model").resolve()}"
dtype = "float32"
lora_rank = 2
[tasks]
path = "tasks.jsonl"
[verifier]
kind = "regex"
pattern = "[a-m]"
[rollout]
tasks_per_step = 2
group_size = 4
max_tokens = 3
[optimiser]
steps = 2
lr = 1e-3
[run]
folder = "run"
tensorboard = true
""",
    encoding="utf-8",
)
done = subprocess.run(
    [sys.executable, "-m", "tfgrpo", "train", "train.toml"],
    capture_output=True,
    text=True,
    check=False,
)
assert done.returncode == 0, done.stderr[-3000:]
assert list(Path("run").rglob("events.out.tfevents*")), list(Path("run").rglob("*"))
