"""A tokenizer whose tokens are whole pieces of the library's prompts, and else single characters.

Text comes back as it was. A prompt around a question takes a few tokens, so that a small model on a
CPU can be asked everything that a large one is. Source: own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.rl.toy.chains import BASE, MEANINGS, STEP_BY_STEP, WORDS
from tfgrpo import prompts
from tfgrpo.hints.second_tries.perturbed import lorem
from tfgrpo.rollout import Task

END = "<end>"
SPECIAL = ("<pad>", "<start>", END)
ASKED = (
    "hint", "hint_partial", "hint_write", "draft", "perturbation", "strategy", "reflect_retry",
    "retry_guidance", "first_wrong_step",
)  # fmt: skip
"""Prompts whose fixed parts are pieces."""


def _pieces() -> list[str]:
    folder = Path(prompts.__file__).parent
    fixed: list[str] = []
    for name in ASKED:
        text = (folder / f"{name}.md").read_text(encoding="utf-8").strip()
        parts = [part for part in re.split(r"\$\w+", text) if part.strip()]
        # a line's end before a part belongs to the digit there
        fixed += [part[k:] for part in parts for k in range(3) if part[:k] == "\n" * k]
    own = ["[user]", "[assistant]", "[system]", "Start ", "So ", "Next.", STEP_BY_STEP, "\n\n"]
    own += [f"{d}\n" for d in range(BASE)] + [f"So {w}." for w in WORDS] + list(WORDS)
    own += [f", {letter} " for letter in "pqrstu"]
    own += [f"Lean to {m}." for m in MEANINGS]
    own += [f"Take {letter} as {m}." for letter in "pqrstu" for m in MEANINGS]
    own += [f"Level {k}: " for k in (1, 2, 3)] + [f"[{k}] " for k in range(6)]
    own += [f"[step {k}] " for k in range(6)]
    own += [
        '{"outcome": "failure", "cause": "a wrong line", "suggestion": "',
        '", "retry_from_step": ',
        "a wrong line",
        '{"first_wrong_step": ',
        '"none"',
    ]
    words = sorted(set(lorem(Task("x", ""), (999, 999), 1).casefold().replace(".", "").split()))
    own += [f"{blank}{w}" for w in words for blank in ("", " ")]
    own += [w.capitalize() for w in words]
    characters = [chr(c) for c in (10, *range(32, 127))]
    return list(dict.fromkeys([*fixed, *own, *characters]))


class Pieces:
    """The tokenizer, with the calls that training makes."""

    chat_template = "yes"
    eos_token_id = 2

    def __init__(self, known: Sequence[str] = ()) -> None:
        known = list(known) or [*SPECIAL, *_pieces()]
        self._ids = {piece: i for i, piece in enumerate(known)}
        self.table = known + ["\ufffd"] * (-len(known) % 64)
        """Pieces by id; the last ones fill the vocabulary up and are never read."""
        longest_first = sorted(known[2:], key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def __len__(self) -> int:
        return len(self.table)

    def apply_chat_template(
        self, turns: Any, *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """Turns as text, each with its end."""
        assert not tokenize
        text = "".join(f"[{t['role']}]{t['content']}{END}" for t in turns)
        return text + "[assistant]" * add_generation_prompt

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [self._ids[m[0]] for m in self._pattern.finditer(text)]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text; special tokens left out where that is asked for."""
        return "".join(self.table[i] for i in ids if i > 2 or not skip_special_tokens)

    def save_pretrained(self, folder: Any) -> None:
        """Write the pieces."""
        (Path(folder) / "pieces.txt").write_text(repr(self.table), encoding="utf-8")
