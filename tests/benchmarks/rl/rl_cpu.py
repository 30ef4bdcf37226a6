"""Group sampling of SmolLM2-135M at 64 rows on CPU: our generator against `generate`.

Both arms in one process, same weights in bfloat16, same prompts (8 × 8 rows), temperature 1 over
the whole vocabulary, 48 forced new tokens, one warm-up each, then the arms take turns; medians.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from tests.benchmarks.record import record
from tfgrpo.lm.local.loading import load_model
from tfgrpo.protocols import Sampling
from tfgrpo.rl.generation.generator import make_generator

PROMPTS = [
    f"What is {a} times {b}? Explain each step of the calculation."
    for a, b in ((12, 7), (31, 4), (9, 18), (25, 6), (14, 14), (8, 33), (21, 5), (17, 11))
]
GROUP, NEW, ROUNDS = 8, 48, 3


def main() -> None:
    """Measure and record."""
    loaded = load_model("smollm2-135m", device="cpu", dtype="bfloat16")
    model, tokenizer = loaded.model, loaded.tokenizer
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False
        )
        for p in PROMPTS
    ]
    ids = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
    tokenizer.padding_side = "left"
    padded = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    padded = {k: v.repeat_interleave(GROUP, 0) for k, v in padded.items()}

    def theirs() -> int:
        with torch.no_grad():
            out = model.generate(
                **padded, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=NEW, min_new_tokens=NEW,
            )  # fmt: skip
        return int((out.shape[1] - padded["input_ids"].shape[1]) * out.shape[0])

    generator = make_generator(model, tokenizer, max_rows=64)
    sampling = Sampling(max_tokens=NEW, extra={"ignore_eos": True})

    def ours() -> int:
        seeds = [[100 * i + j for j in range(GROUP)] for i in range(len(ids))]
        made = generator.generate(ids, GROUP, sampling, seeds)
        return sum(len(row.token_ids) for group in made for row in group)

    rates: dict[str, list[float]] = {"ours": [], "generate": []}
    for round_ in range(ROUNDS + 1):
        for name, run in (("ours", ours), ("generate", theirs)):
            start = time.perf_counter()
            tokens = run()
            if round_:
                rates[name].append(tokens / (time.perf_counter() - start))
    figures: dict[str, Any] = {
        "ours_tok_s": round(statistics.median(rates["ours"]), 1),
        "generate_tok_s": round(statistics.median(rates["generate"]), 1),
        "rows": len(ids) * GROUP,
        "new_tokens": NEW,
        "threads": torch.get_num_threads(),
        "all_tok_s": {k: [round(x, 1) for x in v] for k, v in rates.items()},
    }
    figures["ratio"] = round(figures["ours_tok_s"] / figures["generate_tok_s"], 3)
    record("rl_cpu", figures, "python -m tests.benchmarks.rl.rl_cpu")


if __name__ == "__main__":
    main()
