"""An engine of tokens under real vLLM: are its log-probs those of the trainer's weights?

    python -m tests.vllm.engine_check model FOLDER [untied]
    python -m tests.vllm.engine_check colocated FOLDER
    python -m tests.vllm.engine_check server FOLDER BASE_URL

The first makes FOLDER from the embedded model. The others print one JSON object of mismatches in
nats a token: `before` with the starting weights, `after` with weights that were moved and handed
over, `stale` of the first tokens under the moved weights (what a run would see if the hand-over had
not worked). `untied` gives the model an output layer of its own: vLLM's server on a CPU leaves a
tied one as it was when it reloads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tfgrpo.lm.local.loading import load_model
from tfgrpo.protocols import Generated, Generator, Sampling
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel, load_parts
from tfgrpo.rl.generation.vllm_inprocess import VllmColocated
from tfgrpo.rl.generation.vllm_server import FolderReload, VllmServer
from tfgrpo.rl.model.decoder import hf_views
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.update.accumulate import score_rows
from tfgrpo.rl.update.logprob_mismatch import measure_mismatch

DRAWS = 4
SAMPLING = Sampling(temperature=1.0, max_tokens=16, extra={"ignore_eos": True})
NOISE = 0.05
"""Deviation of the move, in deviations of each weight matrix."""


def make_model(folder: str, *, untied: bool) -> None:
    """Write the embedded model in Hugging Face form, in bfloat16."""
    loaded = load_model("smollm2-135m", device="cpu", dtype="bfloat16")
    if untied:
        loaded.model.config.tie_word_embeddings = False
        head = loaded.model.get_input_embeddings().weight.detach().clone()
        loaded.model.lm_head.weight = torch.nn.Parameter(head)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def prompts(parts: LoadedModel) -> list[tuple[int, ...]]:
    """Four questions as token ids."""
    texts = [f"<|im_start|>user\nTell me about the number {i}.<|im_end|>\n" for i in range(4)]
    return [tuple(parts.tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts]


def draw(engine: Generator, asked: Sequence[Sequence[int]]) -> list[list[Generated]]:
    """Return the engine's continuations, seeds fixed."""
    seeds = [[100 * p + i for i in range(DRAWS)] for p in range(len(asked))]
    return engine.generate(asked, DRAWS, SAMPLING, seeds)


def mismatch(
    parts: LoadedModel, asked: Sequence[tuple[int, ...]], made: Sequence[Sequence[Generated]]
) -> float:
    """Return the mean distance of the engine's log-probs from those of the trainer's weights."""
    pairs = [(ids, g) for ids, row in zip(asked, made, strict=True) for g in row]
    rows = [Row(i, ids, g.token_ids) for i, (ids, g) in enumerate(pairs)]
    scored = score_rows(parts.decoder, rows, temperature=1.0, max_tokens=4096)
    return measure_mismatch(
        [g.logprobs for _, g in pairs], [scored[r.index] for r in rows]
    ).mean_abs


def move(parts: LoadedModel) -> None:
    """Change every weight matrix by noise, as a few large updates would."""
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in parts.decoder.parameters():
            if weight.ndim == 2:
                noise = torch.randn(weight.shape, generator=source) * weight.float().std() * NOISE
                weight.add_(noise.to(weight.dtype))


def check(engine: Generator, parts: LoadedModel) -> dict[str, float]:
    """Draw, move the weights, hand them over, draw again."""
    asked = prompts(parts)
    first = draw(engine, asked)
    found = {"before": mismatch(parts, asked, first)}
    move(parts)
    engine.sync(hf_views(parts.decoder))
    found["after"] = mismatch(parts, asked, draw(engine, asked))
    found["stale"] = mismatch(parts, asked, first)
    found["tokens"] = sum(len(g.token_ids) for row in first for g in row)
    return found


def main(kind: str, folder: str, last: str = "") -> None:
    """Make a model, or an engine on it, and print what was found."""
    if kind == "model":
        make_model(folder, untied=last == "untied")
        return
    parts = load_parts(f"local:{folder}", device="cpu", dtype="bfloat16")
    engine: Generator
    if kind == "colocated":
        engine = VllmColocated(folder, max_model_len=512, dtype="bfloat16", enforce_eager=True)
    else:
        reload = FolderReload(Path(folder), last)
        engine = VllmServer(last, folder, reload=reload, context_tokens=512)
    print(json.dumps(check(engine, parts)))


if __name__ == "__main__":
    main(*sys.argv[1:])
