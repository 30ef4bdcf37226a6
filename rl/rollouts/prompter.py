"""Tasks and texts to prompt token ids, and ids back to text.

Prompts come from `render_messages`, the function that practice and deployment use too. Does not
know rollouts. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tfgrpo.context import EMPTY_CONTEXT, Context, render_messages
from tfgrpo.errors import ConfigError
from tfgrpo.lm.local.chat_template import render_turns
from tfgrpo.messages import Message
from tfgrpo.rollout import Task
from tfgrpo.runtime.texts.surrogates import without_surrogates

PROMPTS_KEPT = 8192
"""Prompts whose token ids are remembered."""


class Prompter:
    """Messages to token ids, by the tokenizer's chat template or as plain text.

    Args:
        tokenizer: a Hugging Face tokenizer.
        system: system text of every prompt.
        template: `chat` or `plain`.
        context_tokens: the model's window.

    Raises:
        ConfigError: `chat` with a tokenizer that has no chat template.
    """

    def __init__(
        self, tokenizer: Any, *, system: str = "", template: str = "chat", context_tokens: int
    ) -> None:
        if template == "chat" and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "this tokenizer has no chat template; set model.template = 'plain' to join the "
                "turns' texts, or use a model with one"
            )
        self.tokenizer = tokenizer
        self._system = system
        self._template = template
        self.context_tokens = context_tokens
        # templates are slow and a task comes again in each epoch
        self._encode = lru_cache(maxsize=PROMPTS_KEPT)(self._encode_messages)

    def ids(self, task: Task, context: Context = EMPTY_CONTEXT) -> tuple[int, ...]:
        """Return the prompt's token ids.

        Raises:
            ConfigError: the prompt leaves no room for a reply in the model's context.
        """
        ids = self.encode(task, context)
        if not 0 < len(ids) < self.context_tokens:
            raise ConfigError(
                f"task {task.task_id!r}: its prompt has {len(ids)} tokens and the model's context "
                f"{self.context_tokens}; shorten the task or leave it out"
            )
        return ids

    def encode(self, task: Task, context: Context = EMPTY_CONTEXT) -> tuple[int, ...]:
        """Return the prompt's token ids, however many they are."""
        return self._encode(render_messages(task.messages, context, system=self._system))

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a prompt that is this text alone, without a system text."""
        return self._encode((Message("user", text),))

    def _encode_messages(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        if self._template == "chat":
            turns = [{"role": m.role, "content": m.content} for m in messages]
            # As the model is asked elsewhere: what its template refuses is folded.
            text, _ = render_turns(self.tokenizer, turns, add_generation_prompt=True)
        else:
            text = without_surrogates("\n\n".join(m.content for m in messages))
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prefix_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a forced start of a reply; its last blanks belong to the next word."""
        if not text:
            return ()
        sound = without_surrogates(text.rstrip(" "))
        return tuple(self.tokenizer(sound, add_special_tokens=False)["input_ids"])

    def text(self, ids: Sequence[int]) -> str:
        """Return a reply's text without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
