"""Chat turns to token ids and back, by a tokenizer's own chat template.

Tools go through the template where it knows them, else as text in the system turn; calls come
back as `<tool_call>{…}</tool_call>`, the notation most small open models were trained on. The
template runs in transformers' sandbox. Does not know decoding. Source: own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tfgrpo.errors import ProviderError
from tfgrpo.lm.wire import message_json
from tfgrpo.messages import Message, ToolCall
from tfgrpo.prompts import render
from tfgrpo.protocols import Request

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>|<tool_call>\s*(\{.*\})\s*\Z", re.DOTALL)


class ChatFormat:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) | frozenset(eos_ids)
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = " ".join(template.values())
        self._template = template or ""
        self.knows_tools = bool(re.search(r"\btools\b", self._template))

    def prompt_ids(self, request: Request) -> tuple[int, ...]:
        """Token ids of the request's turns, ready for the assistant's.

        Raises:
            ProviderError: the template refuses the turns, such as two user turns in a row.
        """
        messages = list(request.messages)
        tools: list[Any] | None = None
        if request.tools and request.tool_choice != "none":
            if self.knows_tools:
                tools = [{"type": "function", "function": t.to_dict()} for t in request.tools]
            else:
                messages = _with_tools_as_text(messages, request)
        if not self._template:
            return tuple(self._tokenizer.encode(_as_plain_text(messages)))
        rows = [self._row(m) for m in messages]
        import jinja2

        try:
            text = self._tokenizer.apply_chat_template(
                rows, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, ValueError, TypeError) as exc:
            raise ProviderError(
                f"the model's chat template refuses these turns: {exc!s:.200}", kind="bad_request"
            ) from exc
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _row(self, message: Message) -> dict[str, Any]:
        row = message_json(message)
        if self.knows_tools:
            for call in row.get("tool_calls", ()):
                call["function"]["arguments"] = _parsed(call["function"]["arguments"])
            row["content"] = row["content"] or ""
            return row
        if message.tool_calls:
            calls = "".join(
                f"<tool_call>{json.dumps({'name': c.name, 'arguments': _parsed(c.arguments)})}"
                "</tool_call>"
                for c in message.tool_calls
            )
            return {"role": "assistant", "content": f"{message.content}{calls}"}
        if message.role == "tool":
            return {
                "role": "user",
                "content": f"<tool_response>{message.content}</tool_response>",
            }
        return {"role": message.role, "content": message.content}

    def text(self, ids: Sequence[int]) -> str:
        """Text of reply ids, special tokens left out."""
        kept = [i for i in ids if i not in self._special]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Text of one token."""
        return str(self._tokenizer.decode([token_id]))

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def cut(self, ids: Sequence[int], stops: Sequence[str]) -> tuple[str, tuple[int, ...]]:
        """Reply text up to the first stop string, and the ids that wrote it: the fewest whose text
        reaches the cut."""
        text = self.text(ids)
        ends = [i for i in (text.find(s) for s in stops if s) if i >= 0]
        if not ends:
            return text, tuple(ids)
        text = text[: min(ends)]
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self.text(ids[:middle])) >= len(text):
                high = middle
            else:
                low = middle + 1
        return text, tuple(ids[:low])

    def safe_prefix(self, text: str, stops: Sequence[str]) -> str:
        """The part of a growing text that no further token can change or cut."""
        text = text.rstrip("\ufffd")
        ends = [i for i in (text.find(s) for s in stops if s) if i >= 0]
        if ends:
            return text[: min(ends)]
        for stop in stops:
            for size in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:size]):
                    return text[:-size]
        return text

    @staticmethod
    def tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Split calls from a reply's text; a call that is no JSON object stays text."""
        calls: list[ToolCall] = []

        def take(match: re.Match[str]) -> str:
            row = _parsed(match[1] or match[2])
            if not isinstance(row, dict) or not isinstance(row.get("name"), str):
                return match[0]
            arguments = row.get("arguments", row.get("parameters", {}))
            written = arguments if isinstance(arguments, str) else json.dumps(arguments)
            calls.append(ToolCall(f"call_{len(calls)}", row["name"], written))
            return ""

        rest = _CALL.sub(take, text)
        return (rest.strip() if calls else text), tuple(calls)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_tools_as_text(messages: list[Message], request: Request) -> list[Message]:
    lines = "\n".join(json.dumps(t.to_dict(), ensure_ascii=False) for t in request.tools)
    words = render("lm_tools", tools=lines)
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{words}"), *messages[1:]]
    return [Message("system", words), *messages]


def _as_plain_text(messages: Sequence[Message]) -> str:
    """For base models without a template: turns as labelled paragraphs."""
    turns = [f"{m.role.capitalize()}: {m.content}" for m in messages]
    return "\n\n".join([*turns, "Assistant:"])
