"""The model that every arm starts from, taught on made-up examples of everything it may be asked.

It is taught to answer with right and wrong meanings in the shares of `PRIOR`, to go on from a hint,
to trust a draft's or an example's lines more than its own, to name a first wrong step and to write
hints (not always readable ones). What second tries need is there by construction: figures on it
tell what a method does with such a model, not what real models can. Source: own.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.rl.toy.chains import (
    ALL,
    MEANINGS,
    PRIOR,
    RIGHT,
    STEP_BY_STEP,
    chain,
    lines_of,
    question,
    right_lines,
    written,
)
from tests.benchmarks.rl.toy.pieces import END, Pieces
from tfgrpo.context import Context, ContextPart, PartKind, render_messages
from tfgrpo.hints.second_tries.perturbed import lorem
from tfgrpo.messages import Message
from tfgrpo.prompts import render
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel
from tfgrpo.rl.model.decoder import decoder_from_hf
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import digest

Example = list[Message]
"""Turns; those of the assistant are taught."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How large the model is and how long it is taught."""

    hidden: int = 64
    layers: int = 2
    heads: int = 2
    head_size: int = 32
    steps: int = 2000
    rows: int = 32
    lr: float = 3e-3


ON_GPU = ModelSize(hidden=256, layers=4, heads=4, head_size=64, steps=3000, rows=256, lr=1e-3)
"""Head size 64, which the kernels are made for."""


def drawn(draw: random.Random, letter: str, chance: float | None = None) -> str:
    """Draw a letter's meaning: the right one with its prior or the given chance."""
    p = PRIOR[letter] if chance is None else chance
    right = RIGHT[letter]
    wrong = [m for m in MEANINGS if m != right]
    return right if draw.random() < p else wrong[draw.random() < 0.3]


def tried(draw: random.Random, text: str) -> list[int]:
    """Draw the lines of a reply at the start's chances."""
    start, links = chain(text)
    return lines_of(start, links, [drawn(draw, letter) for letter, _ in links])


def dots(draw: random.Random) -> str:
    """Draw the dots before a reply: mostly few, in one of twenty many."""
    chance = draw.random()
    if chance < 0.55:
        return ""
    if chance < 0.95:
        return "." * (1 + min(9, int(draw.expovariate(0.5))))
    return "." * draw.randint(10, 40)


def asked(text: str, kind: PartKind | None = None, told: str = "") -> list[Message]:
    """Return a question's prompt with something told."""
    parts = (ContextPart(kind, told),) if kind else ()
    return list(render_messages([Message("user", text)], Context(parts)))


def said(text: str) -> Message:
    """Return a reply."""
    return Message("assistant", text)


def first_wrong(lines: list[int], right: list[int]) -> int:
    """Return the place of the first wrong line; their number where there is none."""
    places = (i for i, (a, b) in enumerate(zip(lines, right, strict=True)) if a != b)
    return next(places, len(right))


def plain(draw: random.Random, text: str) -> Example:
    """A question and a reply."""
    return [*asked(text), said(dots(draw) + written(tried(draw, text)))]


def hinted(draw: random.Random, text: str) -> Example:
    """The first lines in a hint, taken over in the reply."""
    start, links = chain(text)
    right = right_lines(text)
    shown = draw.randint(1, len(right))
    kept = right[: shown if draw.random() < 0.97 else 0]
    rest = [drawn(draw, letter) for letter, _ in links[len(kept) :]]
    lines = kept + lines_of(kept[-1] if kept else start, links[len(kept) :], rest)
    hint = draw.choice(("\n", " ")).join(map(str, right[:shown]))
    return [*asked(text, "hint", hint), said(dots(draw) + written(lines))]


def drafted(draw: random.Random, text: str) -> Example:
    """A draft in the prompt: its right lines are likely taken over, its wrong ones less."""
    start, links = chain(text)
    draft = tried(draw, text)
    lines, value, is_on = [], start, True
    for place, link in enumerate(links):
        right = lines_of(value, [link], [RIGHT[link[0]]])[0]
        is_on = is_on and draft[place] == right
        meaning = drawn(draw, link[0], max(PRIOR[link[0]], 0.85) if is_on else None)
        value = lines_of(value, [link], [meaning])[0]
        lines.append(value)
    shown = dots(draw) + written(draft)
    return [*asked(text, "draft", shown), said(dots(draw) + written(lines))]


def perturbed(draw: random.Random, text: str) -> Example:
    """Meaningless text in front: the chances of meanings come nearer to each other."""
    start, links = chain(text)
    meanings = [drawn(draw, letter, 0.5 * PRIOR[letter] + 1 / 6) for letter, _ in links]
    told = lorem(Task("x", ""), (3, 12), draw.getrandbits(30))
    reply = written(lines_of(start, links, meanings))
    return [*asked(text, "perturbation", told), said(dots(draw) + reply)]


def led(draw: random.Random, text: str) -> Example:
    """A strategy in the prompt: its meaning is taken for every letter, mostly."""
    start, links = chain(text)
    lean = draw.choice(list(MEANINGS))
    meanings = [lean if draw.random() < 0.6 else draw.choice(list(MEANINGS)) for letter, _ in links]
    reply = written(lines_of(start, links, meanings))
    return [*asked(text, "strategy", f"Lean to {lean}."), said(dots(draw) + reply)]


def shown(draw: random.Random, text: str) -> Example:
    """A solved question as turns before it, whose letters' meanings are taken over, mostly."""
    start, links = chain(text)
    other = question(draw, "".join(sorted({letter for letter, _ in links})), (2, 4))
    first, others = chain(other)
    seen = {letter: drawn(draw, letter, 0.5) for letter in ALL}
    example = written(lines_of(first, others, [seen[letter] for letter, _ in others]))
    told = {letter for letter, _ in others}
    meanings = [
        seen[letter] if letter in told and draw.random() < 0.85 else drawn(draw, letter)
        for letter, _ in links
    ]
    reply = written(lines_of(start, links, meanings))
    return [Message("user", other), said(example), *asked(text), said(dots(draw) + reply)]


def writer(draw: random.Random, text: str) -> Example:
    """A request for three hints, answered by growing starts of the solution."""
    right = right_lines(text)
    levels = [" ".join(map(str, right[: k + 1])) for k in range(3)]
    reply = "\n".join(f"Level {k}: {level}" for k, level in enumerate(levels, 1))
    if draw.random() < 0.15:
        reply = f"Level 1: {levels[0]}"
    request = render("hint_write", task=text, solution=written(right))
    return [Message("user", request), said(reply)]


def found(draw: random.Random, text: str) -> Example:
    """A request for the first wrong step of an attempt."""
    lines, right = tried(draw, text), right_lines(text)
    steps = [*map(str, lines), written(lines).rsplit("\n", 1)[1]]
    at = first_wrong(lines, right)
    if draw.random() < 0.2:
        at = draw.randrange(len(lines))
    attempt = "\n".join(f"[{i}] {s}" for i, s in enumerate(steps))
    request = render("first_wrong_step", task=text, solution=written(right), attempt=attempt)
    named = '"none"' if at == len(lines) else str(at)
    return [Message("user", request), said(f'{{"first_wrong_step": {named}}}')]


def walked(draw: random.Random, text: str) -> Example:
    """A question a turn a link; in a third of them behind what an earlier attempt taught."""
    lines = tried(draw, text)
    prompt = asked(STEP_BY_STEP + text)
    if draw.random() < 1 / 3:
        start, links = chain(text)
        letter, meaning = draw.choice(links)[0], draw.choice(list(MEANINGS))
        told = render(
            "retry_guidance", cause="a wrong line", suggestion=f"Take {letter} as {meaning}."
        )
        meanings = [
            meaning if x == letter and draw.random() < 0.9 else drawn(draw, x) for x, _ in links
        ]
        lines = lines_of(start, links, meanings)
        prompt = asked(STEP_BY_STEP + text, "hint", told)
    turns = [m for x in lines for m in (said(str(x)), Message("user", "Next."))]
    return [*prompt, *turns[:-1]]


def reflected(draw: random.Random, text: str) -> Example:
    """A request to say what went wrong in an attempt of several turns."""
    lines, right = tried(draw, text), right_lines(text)
    at = min(first_wrong(lines, right), len(lines) - 1)
    if draw.random() < 0.2:
        at = draw.randrange(len(lines))
    letter = chain(text)[1][at][0]
    meaning = drawn(draw, letter, 0.7)
    attempt = "\n".join(
        f"[step {i}] {x}" + "\nNext." * (i < len(lines) - 1) for i, x in enumerate(lines)
    )
    request = render(
        "reflect_retry", task=STEP_BY_STEP + text, attempt=attempt, last=str(len(lines) - 1)
    )
    reply = {
        "outcome": "failure",
        "cause": "a wrong line",
        "suggestion": f"Take {letter} as {meaning}.",
        "retry_from_step": at,
    }
    return [Message("user", request), said(json.dumps(reply))]


FORMS: dict[Callable[[random.Random, str], Example], float] = {
    plain: 0.3,
    hinted: 0.12,
    drafted: 0.1,
    perturbed: 0.08,
    led: 0.05,
    shown: 0.08,
    writer: 0.05,
    found: 0.05,
    walked: 0.12,
    reflected: 0.05,
}
"""Share of each form among the examples."""


def taught_ids(tokenizer: Pieces, example: Example) -> tuple[list[int], list[bool]]:
    """Return an example's tokens and which of them are taught."""
    ids: list[int] = []
    mask: list[bool] = []
    for turn in example:
        is_reply = turn.role == "assistant"
        for text, is_taught in ((f"[{turn.role}]", False), (turn.content + END, is_reply)):
            part = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += part
            mask += [is_taught] * len(part)
    return ids, mask


Draw = Callable[[random.Random, int], list[Example]]


def of_chains(draw: random.Random, n: int) -> list[Example]:
    """Draw n examples, each of some form."""
    forms = draw.choices(list(FORMS), list(FORMS.values()), k=n)
    return [form(draw, question(draw, ALL, (1, 5))) for form in forms]


def batches(
    tokenizer: Pieces, draw: random.Random, rows: int, examples: Draw
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield padded tokens and labels for ever; a batch holds examples of like length."""
    while True:
        made = [taught_ids(tokenizer, example) for example in examples(draw, 8 * rows)]
        made.sort(key=lambda one: len(one[0]))
        parts = [made[i * rows : (i + 1) * rows] for i in range(8)]
        draw.shuffle(parts)
        for part in parts:
            yield padded(part)


def padded(made: Sequence[tuple[list[int], list[bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded tokens and labels (-100 where nothing is taught)."""
    width = max(len(ids) for ids, _ in made)
    ids_BT = torch.zeros(len(made), width, dtype=torch.long)
    labels_BT = torch.full((len(made), width), -100)
    for i, (ids, mask) in enumerate(made):
        ids_BT[i, : len(ids)] = torch.tensor(ids)
        kept = [t if m else -100 for t, m in zip(ids, mask, strict=True)]
        labels_BT[i, : len(ids)] = torch.tensor(kept)
    return ids_BT, labels_BT


def model_of(size: ModelSize, vocabulary: int) -> Any:
    """Return a Hugging Face model of this size with drawn weights."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=max(1, size.heads // 2),
        head_dim=size.head_size,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config)


def start_model(
    size: ModelSize, device: str, draw: Draw = of_chains
) -> tuple[LoadedModel, dict[str, float]]:
    """Return the taught model, and its last losses; taught once a size.

    The file is named by a digest of the size and of examples, so that another recipe is taught
    anew.
    """
    from safetensors.torch import load_file, save_file

    tokenizer = Pieces()
    name = f"tfgrpo-toy-{recipe(tokenizer, size, draw)}.safetensors"
    path = Path(tempfile.gettempdir()) / name
    model = model_of(size, len(tokenizer)).to(device)
    if not path.exists():
        examples = batches(tokenizer, random.Random(1), size.rows, draw)
        loss = _teach(model, examples, size, device)
        kept = {k: v.contiguous() for k, v in model.state_dict().items() if k != TIED}
        beside = path.with_suffix(f".{os.getpid()}")
        save_file(kept | {"loss": torch.tensor(loss)}, beside)
        beside.rename(path)
    kept = load_file(path, device=device)
    figures = {"steps": float(size.steps), "loss": float(kept.pop("loss"))}
    model.load_state_dict(kept | {TIED: kept["model.embed_tokens.weight"]})
    model = model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
    parts = LoadedModel(
        decoder=decoder_from_hf(model),
        tokenizer=tokenizer,
        save_extras=lambda folder: model.config.save_pretrained(folder),
        eos_ids=(2,),
        name="toy",
    )
    return parts, figures


TIED = "lm_head.weight"
"""Stored with the embeddings, which it is."""


def recipe(tokenizer: Pieces, size: ModelSize, draw: Draw) -> str:
    """Return a digest of a size and of what is taught."""
    examples = batches(tokenizer, random.Random(1), 64, draw)
    some = [next(examples)[0].tolist() for _ in range(8)]
    return digest([asdict(size), some], 16)


def _teach(
    model: Any, examples: Iterator[tuple[torch.Tensor, torch.Tensor]], size: ModelSize, device: str
) -> float:
    adam = torch.optim.AdamW(model.parameters(), lr=size.lr, weight_decay=0.01, betas=(0.9, 0.98))
    warm = size.steps // 20

    def rate(step: int) -> float:
        return min((step + 1) / warm, max(0.02, 1 - step / size.steps))

    plan = torch.optim.lr_scheduler.LambdaLR(adam, rate)
    losses: list[float] = []
    for _ in range(size.steps):
        ids_BT, labels_BT = next(examples)
        out = model(input_ids=ids_BT.to(device), labels=labels_BT.to(device))
        adam.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        plan.step()
        losses.append(float(out.loss.detach()))
        if len(losses) % 200 == 0:
            print(f"taught {len(losses)} steps, loss {sum(losses[-50:]) / 50:.3f}", flush=True)
    return sum(losses[-50:]) / 50
