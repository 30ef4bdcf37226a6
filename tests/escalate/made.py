"""A finished learning run without a model, and a tiny model on disk that can be trained from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.rl.tiny import tiny_hf
from tfgrpo import Config, FunctionPolicy, Task, learn
from tfgrpo.rollout import Rollout, Score
from tfgrpo.verifiers import FunctionVerifier

GOOD = frozenset("abcdefghijklm")
"""Letters that a reply should be made of; half of the tiny model's vocabulary of letters."""


def write_model(folder: Path, seed: int = 0) -> Path:
    """A two-layer Llama with one token a character, its tokenizer and chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(62 + i): i for i in range(3, 64)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    torch.manual_seed(seed)
    tiny_hf(seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def score(rollout: Rollout, task: Task) -> Score:
    """1 for a reply of good letters only, half of it for every second one."""
    letters = [c for c in rollout.answer if c.isalpha()]
    share = sum(c in GOOD for c in letters) / max(1, len(letters))
    return Score(1.0 if share == 1 else round(share, 2) / 2)


def verifier() -> FunctionVerifier:
    return FunctionVerifier(score, verifier_id="good-letters", reward_range=(0.0, 1.0))


def agent(prompt: str, context: Any, seed: int = 0) -> str:
    """Says good letters with examples, seldom without."""
    return "ab" if context.parts or seed % 4 == 0 else "zz"


def tasks(n: int = 18) -> list[Task]:
    return [Task(f"t{i}", f"say {chr(97 + i)}", metadata={"solution": "abcdef"}) for i in range(n)]


def run_config(folder: Path, model: str, **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "run": {"folder": str(folder), "on_truncated": "grade"},
        "policy": {"lm": model, "sampling": {"temperature": 1.0, "max_tokens": 4}},
        "learn": {
            "batch": 6,
            "group_size": 4,
            "entries": "exemplars",
            "settings": {"exemplars": 2},
        },
        "gate": {"group_size": 4, "test_group_size": 3},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Config.from_mapping(values)


def learnt(place: Path, model: str = "", **sections: dict[str, Any]) -> Path:
    """Learn with the scripted agent and return the run's folder; its policy names the model."""
    lm = model or f"local:{write_model(place / 'model')}"
    config = run_config(place / "run", lm, **sections)
    learn(
        config,
        tasks=tasks(),
        policy=FunctionPolicy(agent, policy_id="agent"),
        verifier=verifier(),
    )
    return place / "run"
