"""A small model of known success rates, made here, and the tasks that it answers.

A task is a family's letter and a number of two digits, its answer their sum modulo 10. The model is
taught on labels that are right as often as the family says, so that at temperature 1 its success
rates run from never to always; training by reward then raises them. Does not know that training.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tfgrpo.rollout import Task

RIGHT = {"A": 0.0, "B": 0.0, "C": 0.02, "D": 0.1, "E": 0.35, "F": 0.7, "G": 0.95, "H": 1.0}
"""Share of right labels by family."""
STEPS, BATCH, LR = 300, 256, 2e-3


def draw_tasks() -> list[Task]:
    """Return all 800 tasks in a random order."""
    found = [
        Task(f"{family}-{x}{y}", f"{family} {x}{y}", (x + y) % 10)
        for family in RIGHT
        for x in range(10)
        for y in range(10)
    ]
    random.Random("family tasks").shuffle(found)
    return found


def make_model(folder: Path, seed: int = 0) -> Path:
    """Teach a model of half a million weights and write it as `from_pretrained` takes it."""
    import transformers

    tokenizer = _tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=192, intermediate_size=384, num_hidden_layers=2, head_dim=64,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.LlamaForCausalLM(config).to(device)
    tasks = draw_tasks()
    prompts = torch.tensor([_ids(tokenizer, t.text) for t in tasks], device=device)
    digits = torch.tensor([tokenizer.convert_tokens_to_ids(str(d)) for d in range(10)])
    digits, n = digits.to(device), prompts.shape[1]
    answers = torch.tensor([int(str(t.reference)) for t in tasks], device=device)
    right = torch.tensor([RIGHT[t.task_id[0]] for t in tasks], device=device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        at = torch.randint(len(tasks), (BATCH,), device=device)
        off = torch.randint(1, 10, (BATCH,), device=device)
        is_right = torch.rand(BATCH, device=device) < right[at]
        said = digits[(answers[at] + torch.where(is_right, 0, off)) % 10]
        end = torch.full_like(said, config.eos_token_id)
        rows = torch.cat([prompts[at], said[:, None], end[:, None]], dim=1)
        logits = model(rows).logits[:, n - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, n:].flatten())
        for group in optimiser.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 50, 3 * (1 - step / STEPS))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.cpu().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _ids(tokenizer: Any, text: str) -> Sequence[int]:
    turns = [{"role": "user", "content": text}]
    told = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids: Sequence[int] = tokenizer(told, add_special_tokens=False)["input_ids"]
    return ids


def _tokenizer() -> Any:
    """One token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = [f"{n:02d}" for n in range(100)]
    words = ["<pad>", "<s>", "</s>", "<unk>", "?", *RIGHT, *numbers, *map(str, range(10))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = "{% for m in messages %}{{ m['content'] }} ? {% endfor %}"
    return made
