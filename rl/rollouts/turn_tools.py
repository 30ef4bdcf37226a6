"""Turns with tools: offering them, running what a reply asks for, and the tokens of the answer.

Does not know how rollouts are sampled. Source: own; the text form of a call is that of ReAct (Yao
et al., 2023), the native form is the chat template's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.lm.local.chat_template import ChatFormat, render_turns
from tfgrpo.messages import Message, ToolCall
from tfgrpo.policies.tool_calls import parse_action
from tfgrpo.policies.tool_loop import run_call
from tfgrpo.policies.tools import Tool
from tfgrpo.prompts import render
from tfgrpo.runtime.terminal import clip
from tfgrpo.runtime.texts.surrogates import without_surrogates

_MARK = "tfgrpoassistantturn"
MOST_CALLS = 16
"""Native calls run of one reply."""
STOP = "\nObservation:"
"""Ends a turn in which the model goes on to make up what a tool says."""


class TurnTools:
    """Runs the tools that a reply asks for; a reply without a call is the answer.

    Args:
        tools: by name.
        native: calls are read and answered in the chat template's form, any number a reply (up to
            `MOST_CALLS`); else as text, one a reply.
        timeout_s: limit of a tool without one of its own.
        max_chars: longest observation; longer ones keep their head and tail.
    """

    def __init__(
        self, tools: Mapping[str, Tool], *, native: bool = False, timeout_s: float, max_chars: int
    ) -> None:
        self._tools = tools
        self._native = native
        self._timeout_s = timeout_s
        self._max_chars = max_chars
        self._calls = self._invalid = 0

    async def act(self, action: Message) -> Sequence[Message] | None:
        """Return the tools' answers, a turn each, or None."""
        if self._native:
            calls = ChatFormat.tool_calls(action.content)[1][:MOST_CALLS]
        else:
            written = parse_action(action.content)
            calls = () if written is None else (written,)
        return [await self._answer(call) for call in calls] or None

    async def _answer(self, call: ToolCall) -> Message:
        text, was_run = await run_call(call, self._tools, timeout_s=self._timeout_s)
        self._calls += was_run
        self._invalid += not was_run
        text = clip(text, self._max_chars)
        if self._native:
            return Message("tool", text, tool_call_id=call.call_id)
        return Message("user", render("react_observation", text=text))

    def facts(self) -> dict[str, Any]:
        """Tools that were run, and calls that could not be."""
        return {"tool_calls": self._calls, "invalid_actions": self._invalid}


class OffersTools:
    """A tokenizer whose chat template is always given these tools; else the tokenizer itself.

    Raises:
        ConfigError: the template knows no tools.
    """

    def __init__(self, tokenizer: Any, tools: Mapping[str, Tool]) -> None:
        if not re.search(r"\btools\b", str(getattr(tokenizer, "chat_template", ""))):
            raise ConfigError(
                "this model's chat template knows no tools; set multi_turn.calls = 'text'"
            )
        self._tokenizer = tokenizer
        self._tools = [{"type": "function", "function": t.spec.to_dict()} for t in tools.values()]

    def apply_chat_template(self, turns: Any, **options: Any) -> Any:
        """Render turns with the tools."""
        return self._tokenizer.apply_chat_template(turns, tools=self._tools, **options)

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Tokenise."""
        return self._tokenizer(*given, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class TurnText:
    """Observation turns to the token ids between a model's turn and its next one.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: `chat` or `plain`.
        eos_ids: tokens that end a turn; where the model wrote one, the template's is left out.

    Raises:
        ConfigError: the chat template changes what stands in an assistant turn.
    """

    def __init__(self, tokenizer: Any, *, template: str, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._is_chat = template == "chat"
        self._ends = {t: str(tokenizer.decode([t])) for t in eos_ids}
        self([Message("user", "x")], ())

    def __call__(self, messages: Sequence[Message], last_ids: Sequence[int]) -> list[int]:
        """Return the ids that follow the model's turn `last_ids`."""
        text = self._tail(messages)
        end = self._ends.get(last_ids[-1], "") if last_ids else ""
        if end:
            text = text.removeprefix(end)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tail(self, messages: Sequence[Message]) -> str:
        if not self._is_chat:
            joined = "\n\n".join(m.content for m in messages)
            return f"\n\n{without_surrogates(joined)}\n\n"
        turns = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _MARK},
            *({"role": m.role, "content": m.content} for m in messages),
        ]
        text, _ = render_turns(self._tokenizer, turns, add_generation_prompt=True)
        _, mark, tail = text.rpartition(_MARK)
        if not mark:
            raise ConfigError(
                "this tokenizer's chat template does not keep assistant turns, so a turn cannot be "
                "continued; set model.template = 'plain'"
            )
        return tail
