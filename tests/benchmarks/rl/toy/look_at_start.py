"""Tells how well the start does what second tries ask of it, bare and with each kind of help.

python -m tests.benchmarks.rl.toy.look_at_start --device cuda
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch

from tests.benchmarks.rl.toy.warm_start import (
    FORMS,
    ON_GPU,
    ModelSize,
    start_model,
)
from tests.benchmarks.rl.toy.world import ALL, EASY, HARD, question, share_right
from tfgrpo.protocols import Sampling
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.rollouts.prompter import Prompter


def figures(device: str, size: ModelSize, draws: int = 256) -> dict[str, object]:
    """Shares of right replies by form and by letters, and of readable texts."""
    began = time.perf_counter()
    parts, taught = start_model(size, device)
    took = time.perf_counter() - began
    generator = GroupGenerator(parts.decoder, eos_ids=(2,), detokenize=parts.text_of, max_rows=128)
    prompter = Prompter(parts.tokenizer, context_tokens=512)

    def replies(prompts: list[tuple[int, ...]]) -> list[str]:
        found = generator.generate(
            prompts, 1, Sampling(max_tokens=48), [[i] for i in range(len(prompts))]
        )
        return [prompter.text(row[0].token_ids) for row in found]

    row: dict[str, object] = {"teaching_s": round(took, 1), **taught}
    for name, letters in (("easy", EASY), ("all", ALL), ("hard", HARD)):
        for n in (1, 2, 3, 4):
            draw = random.Random(7)
            texts = [question(draw, letters, (n, n)) for _ in range(draws)]
            said = replies([prompter.text_ids(t) for t in texts])
            right = [share_right(t, s) == 1 for t, s in zip(texts, said, strict=True)]
            row[f"{name}_{n}"] = round(statistics.mean(right), 3)
    for form in FORMS:
        row[form.__name__] = round(_form(form, prompter, replies, draws), 3)
    return row


def _form(
    form: Callable[..., object],
    prompter: Prompter,
    replies: Callable[[list[tuple[int, ...]]], list[str]],
    draws: int,
) -> float:
    """Share of right first replies under a form, for writers of texts equal to a taught reply."""
    draw = random.Random(8)
    prompts, wanted = [], []
    for _ in range(draws):
        text = question(draw, HARD, (3, 3))
        turns = form(draw, text)
        last = next(i for i, m in enumerate(turns) if m.role == "assistant" and i + 1 != 2 - 1)
        if form.__name__ == "shown":
            last = 3
        prompts.append(prompter._encode(tuple(turns[:last])))
        wanted.append((text, turns[last].content))
    said = replies(prompts)
    if form.__name__ in ("writer", "found", "reflected", "walked"):
        return statistics.mean(s == w for s, (_, w) in zip(said, wanted, strict=True))
    return statistics.mean(share_right(t, s) == 1 for s, (t, _) in zip(said, wanted, strict=True))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    size = ON_GPU if given.device == "cuda" else ModelSize()
    print(json.dumps(figures(given.device, size)))


if __name__ == "__main__":
    main()
