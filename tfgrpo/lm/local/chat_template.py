"""Chat turns to token ids and back, by a tokenizer's own chat template.

Tools go through the template where it knows them, else as text in the system turn; calls come
back as `<tool_call>{…}</tool_call>`, the notation most small open models were trained on. The
template runs in transformers' sandbox. Does not know decoding. Source: own.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from tfgrpo.errors import ProviderError
from tfgrpo.lm.wire import loads, message_json
from tfgrpo.messages import Message, ToolCall
from tfgrpo.prompts import render
from tfgrpo.protocols import Request
from tfgrpo.runtime.json_text import shown
from tfgrpo.runtime.texts.surrogates import without_surrogates

log = logging.getLogger(__name__)

_CALL_MARK = re.compile(r"</?tool_call>")


class ChatFormat:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) | frozenset(eos_ids)
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = " ".join(template.values())
        self._template = template or ""
        self._has_told = False
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
            text = without_surrogates(_as_plain_text(messages))
            return tuple(self._tokenizer.encode(text))
        options = template_options(request)
        text = self._rendered([self._row(m) for m in messages], tools, options)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _rendered(
        self, rows: list[dict[str, Any]], tools: list[Any] | None, options: Mapping[str, Any]
    ) -> str:
        text, why = render_turns(self._tokenizer, rows, tools=tools, **options)
        if why and not self._has_told:
            self._has_told = True
            log.warning("the model's chat template %s; such turns are folded into user turns", why)
        return text

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
        kept: list[str] = []
        at, opening = 0, None
        for mark in chain(_CALL_MARK.finditer(text), [None]):
            if mark is not None and mark[0] == "<tool_call>":
                opening = mark
                continue
            if opening is not None:
                body = text[opening.end() : mark.start() if mark else None]
                if (call := _call_in(body, len(calls))) is not None:
                    calls.append(call)
                    kept.append(text[at : opening.start()])
                    at = mark.end() if mark else len(text)
            opening = None
        rest = "".join([*kept, text[at:]])
        return (rest.strip() if calls else text), tuple(calls)


def render_turns(
    tokenizer: Any, rows: Sequence[Mapping[str, Any]], **options: Any
) -> tuple[str, str]:
    """Return turns as text by a tokenizer's chat template, and why they had to be folded.

    Some templates know no system turn, or want user and assistant in alternation; some drop a
    system turn without a word. Then its text opens the next user turn.

    Raises:
        ProviderError: the template refuses them in every form.
    """
    import jinja2

    given = list(without_surrogates(rows))
    refusal: Exception | None = None
    for form in (list, _system_folded, _alternating):
        turns = form(given)
        try:
            text = _applied(tokenizer, turns, options)
            if form is not _alternating and _drops_system(tokenizer, turns, options):
                continue
        except (jinja2.TemplateError, ValueError, TypeError) as exc:
            refusal = refusal or exc
            continue
        if turns == given:
            return text, ""
        said = f"refuses turns as they are ({refusal!s:.100})" if refusal else "drops system turns"
        return text, said
    raise ProviderError(
        f"the model's chat template refuses these turns: {refusal!s:.200}", kind="bad_request"
    ) from refusal


def _applied(tokenizer: Any, turns: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """Return what a template makes of turns; where it leaves out their last text, as those of
    models for pictures do with anything but lists of parts, it gets such lists."""
    import jinja2

    text = str(tokenizer.apply_chat_template(turns, tokenize=False, **options))
    said = [t["content"].strip() for t in turns if isinstance(t.get("content"), str)]
    if not said or said[-1] in text:
        return text
    parted = [
        {**t, "content": [{"type": "text", "text": t["content"]}]}
        if isinstance(t.get("content"), str)
        else t
        for t in turns
    ]
    try:
        again = str(tokenizer.apply_chat_template(parted, tokenize=False, **options))
    except (jinja2.TemplateError, ValueError, TypeError):  # it takes texts, and changes them
        return text
    return again if said[-1] in again else text


def _drops_system(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> bool:
    """True where a system turn with text in it leaves nothing behind: a mark in its place, which
    no other turn and no template holds, does not come back."""
    marks = {
        at: f"system-turn-{at}-{secrets.token_hex(8)}"
        for at, turn in enumerate(turns)
        if turn["role"] == "system" and str(turn["content"]).strip()
    }
    if not marks:
        return False
    marked = [{**t, "content": marks[i]} if i in marks else t for i, t in enumerate(turns)]
    text = _applied(tokenizer, marked, options)
    return not all(mark in text for mark in marks.values())


TEMPLATE_OPTIONS = ("continue_final_message", "add_generation_prompt", "chat_template_kwargs")
"""Keys of `sampling.extra` that say how turns are rendered."""


def template_options(request: Request) -> dict[str, Any]:
    """Return how a request asks for its turns to be rendered.

    Raises:
        ProviderError: it asks for something that decoding here cannot give; the message names it.
    """
    extra = dict(request.sampling.extra)
    going_on = bool(extra.pop("continue_final_message", False))
    options = dict(extra.pop("chat_template_kwargs", None) or {})
    opens = extra.pop("add_generation_prompt", not going_on)
    extra.pop("ignore_eos", None)  # how long replies are, which the generator takes
    wanted = {f"sampling.extra: {name}": value for name, value in extra.items()}
    if (request.response_format or {}).get("type", "text") != "text":
        wanted["response_format"] = request.response_format
    if request.tools and request.tool_choice not in (None, "auto", "none"):
        wanted["tool_choice"] = request.tool_choice
    if wanted:
        name, value = next(iter(wanted.items()))
        raise ProviderError(
            f"{name} = {shown(value)} is not supported by models that run here; leave it out",
            kind="bad_request",
        )
    if going_on:
        options["continue_final_message"] = True
    return options | {"add_generation_prompt": bool(opens) and not going_on}


def _system_folded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns with each system turn's text at the head of the next user turn."""
    turns: list[dict[str, Any]] = []
    waiting: list[str] = []
    for row in rows:
        if row["role"] == "system":
            waiting.append(str(row["content"]))
            continue
        if waiting and row["role"] == "user":
            row = {**row, "content": "\n\n".join([*waiting, str(row["content"])])}
            waiting = []
        turns.append(row)
    if waiting:
        turns.append({"role": "user", "content": "\n\n".join(waiting)})
    return turns


def _alternating(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns as user and assistant in alternation, beginning with the user."""
    turns: list[dict[str, Any]] = []
    for row in _system_folded(rows):
        role, text = row["role"], str(row["content"] or "")
        if role == "tool":
            role, text = "user", f"<tool_response>{text}</tool_response>"
        for call in row.get("tool_calls", ()):
            text += f"<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>"
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{text}"
        elif role == "assistant" and not turns:
            turns += [{"role": "user", "content": "…"}, {"role": role, "content": text}]
        else:
            turns.append({"role": role, "content": text})
    return turns


def _parsed(text: str) -> Any:
    try:
        return loads(text.encode("utf-8", "surrogatepass"))
    except ValueError:
        return text


def _call_in(body: str, number: int) -> ToolCall | None:
    """Return the call that stands between the marks of one; None where it is none."""
    row = _parsed(body.strip()) if body.strip().startswith("{") else None
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        return None
    arguments = row.get("arguments", row.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(f"call_{number}", row["name"], written)


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
