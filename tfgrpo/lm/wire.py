"""The chat-completions wire format: our requests as JSON, its choices as our completions.

Shared by every backend that speaks it (`openai`, `litellm`, our own server). Tolerates what
servers really send: null fields, unknown fields, tool-call pieces in any order, reasoning in three
places. Does not know HTTP, streams' framing, or prices. Source: own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tfgrpo.errors import ProviderError
from tfgrpo.lm.finish_words import finish_of, finish_word
from tfgrpo.messages import Message, ToolCall
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Usage
from tfgrpo.runtime.thinking import split_thinking

_MAX_DEPTH = 200
_MOST_TRIES = 1000
"""How often the arguments of one call are looked at for being whole."""
_MARK = re.compile(rb'[\[\]{}"\\]')


def loads(raw: bytes) -> Any:
    """Parse JSON that a stranger sent.

    Raises:
        ValueError: not JSON, or nested over 200 deep; depth is looked at beforehand, so that no
            recursion of a parser depends on a stranger.
    """
    if raw.count(b"[") + raw.count(b"{") > _MAX_DEPTH:
        depth, skip, in_text = 0, 0, False
        for match in _MARK.finditer(raw):
            mark = match[0]
            if match.start() < skip:
                continue
            if in_text:
                if mark == b"\\":
                    skip = match.end() + 1
                in_text = mark != b'"'
            elif mark == b'"':
                in_text = True
            elif mark != b"\\":
                depth += 1 if mark in b"[{" else -1
                if depth > _MAX_DEPTH:
                    raise ValueError(f"JSON nested over {_MAX_DEPTH} deep")
    return json.loads(raw)


def message_json(message: Message) -> dict[str, Any]:
    """Return a turn in wire form; reasoning is never sent back."""
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        row["content"] = message.content or None
        row["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        row["tool_call_id"] = message.tool_call_id
    return row


def request_json(request: Request, model: str) -> dict[str, Any]:
    """Return the body of a request, without `n`, `seed` and streaming fields."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": [message_json(m) for m in request.messages],
    }
    optional = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop) or None,
        "reasoning_effort": sampling.reasoning_effort,
        "response_format": dict(request.response_format) if request.response_format else None,
    }
    body.update({k: v for k, v in optional.items() if v is not None})
    if sampling.logprobs or sampling.top_logprobs:
        body["logprobs"] = True
        if sampling.top_logprobs:
            body["top_logprobs"] = sampling.top_logprobs
    if request.tools:
        body["tools"] = [{"type": "function", "function": t.to_dict()} for t in request.tools]
    if request.tool_choice is not None:
        body["tool_choice"] = _tool_choice(request.tool_choice)
    body.update(sampling.extra)
    return body


def _tool_choice(choice: str) -> Any:
    if choice in ("auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}}


@dataclass(slots=True)
class ChoiceParts:
    """What is known of one choice so far; fed by stream deltas or by one whole message."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: tuple[int, ...] | None = None
    finish: str | None = None
    _newest: dict[int, int] = field(default_factory=dict)
    """The slot of the newest call under each index that the server wrote."""
    _slots: dict[str, int] = field(default_factory=dict)
    """The slot of the first call with each id."""
    _free: int = 0
    """The slot behind all calls."""

    @property
    def has_output(self) -> bool:
        """True once any text, thinking or call was received."""
        return bool(self.content or self.reasoning or self.refusal or self.calls)

    def add(self, choice: Mapping[str, Any], delta: Any) -> bool:
        """Take one delta (or message) of the choice; True when it brought any output."""
        brought = False
        if isinstance(delta, Mapping):
            brought = self._add_delta(delta, is_whole=choice.get("message") is delta)
        entries = choice.get("logprobs")
        if isinstance(entries, Mapping) and isinstance(entries.get("content"), list):
            self.logprobs.extend(e for e in entries["content"] if isinstance(e, Mapping))
        ids = choice.get("token_ids")
        if isinstance(ids, list) and all(_is_token_id(i) for i in ids):
            self.token_ids.extend(ids)
        self.finish = finish_word(choice.get("finish_reason")) or self.finish
        return brought

    def _add_delta(self, delta: Mapping[str, Any], *, is_whole: bool) -> bool:
        brought = False
        for name, target in (
            ("content", self.content),
            ("reasoning_content", self.reasoning),
            ("refusal", self.refusal),
        ):
            value = _text(delta.get(name))
            if name == "reasoning_content" and not value:
                value = _text(delta.get("reasoning"))
            if value:
                target.append(value)
                brought = True
        pieces = delta.get("tool_calls")
        if isinstance(pieces, Mapping):
            pieces = [pieces]  # one call that is not in a list
        if not pieces and isinstance(delta.get("content"), list):
            pieces = [p for p in delta["content"] if _is_call_part(p)]
        for place, piece in enumerate(pieces if isinstance(pieces, list) else ()):
            if isinstance(piece, Mapping):
                # A whole message lists its calls: each is one of its own, whatever its id.
                self._add_call(place if is_whole else self._slot_of(place, piece), piece)
                brought = True
        if isinstance(old := delta.get("function_call"), Mapping) and not pieces:
            self._add_call(0, {"function": old})  # the form before parallel calls
            brought = True
        return brought

    def _add_call(self, slot: int, piece: Mapping[str, Any]) -> None:
        call = self.calls.setdefault(
            slot, {"id": "", "name": "", "arguments": [], "size": 0, "tries": 0}
        )
        self._free = max(self._free, slot + 1)
        if piece.get("id") and call["id"] != (given := str(piece["id"])):
            if self._slots.get(call["id"]) == slot:
                del self._slots[call["id"]]
            call["id"] = given
            self._slots.setdefault(given, slot)
        function = _function_of(piece)
        name, arguments = function.get("name"), _arguments_of(function)
        is_again = isinstance(name, str) and name == call["name"]
        if isinstance(name, str) and not is_again:
            call["name"] += name
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments)
        if not isinstance(arguments, str):
            return
        is_as_long = bool(is_again and piece.get("id")) and 0 < len(arguments) == call["size"]
        if is_as_long and arguments == "".join(call["arguments"]):
            return  # the whole call once more, at its end
        call["arguments"].append(arguments)
        call["size"] += len(arguments)

    def _slot_of(self, place: int, piece: Mapping[str, Any]) -> int:
        """Where a piece belongs: an id names its call, whatever index the server writes.

        Servers repeat an index over parallel calls, or leave it out. A piece with a new id begins
        a new call; one without an id goes on with the newest call of its index.
        """
        given, index = piece.get("id"), _index(piece.get("index"))
        name = str(given) if given else ""
        is_named = bool(_function_of(piece).get("name"))
        if index is not None and name and self._id_at(index) == name:
            return self._newest[index]  # ids that several calls share
        if name in self._slots and not (
            is_named and index is not None and index not in self._newest
        ):
            return self._slots[name]
        free = self._free
        if index is not None:
            slot = self._newest.get(index, free if index in self.calls else index)
            if slot in self.calls and self._is_another(self.calls[slot], piece):
                slot = free
            self._newest[index] = slot
            return slot
        if not self.calls:
            return place
        newest = self.calls[free - 1]
        return free if name or self._is_another(newest, piece) else free - 1

    def _id_at(self, index: int) -> str:
        slot = self._newest.get(index)
        return str(self.calls[slot]["id"]) if slot in self.calls else ""

    @staticmethod
    def _is_another(call: dict[str, Any], piece: Mapping[str, Any]) -> bool:
        """Tell whether a piece that comes to a call begins another one: it has an id of its own, or
        names a function after whole arguments. An id without a name in the middle of arguments is
        a server's that makes up an id for every piece."""
        is_named = bool(_function_of(piece).get("name"))
        has_other_id = bool(piece.get("id")) and bool(call["id"])
        if has_other_id and is_named:
            return True
        if not has_other_id and (piece.get("id") or not is_named):
            return False
        if call["tries"] > _MOST_TRIES:
            return False
        call["tries"] += 1
        return _is_object("".join(call["arguments"]))

    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls in index order; one without an id of its own gets one from its place."""
        calls: dict[str, ToolCall] = {}
        for slot, call in sorted(self.calls.items()):
            if not call["name"]:
                continue
            given = call["id"] or f"call_{slot}"
            name = given if given not in calls else f"{given}_{slot}"
            calls[name] = ToolCall(name, call["name"], _whole(call["arguments"]))
        return tuple(calls.values())

    def completion(self, *, usage: Usage, model: str) -> Completion:
        """The finished reply."""
        calls = self.tool_calls()
        finish = finish_of(self.finish, has_tool_calls=bool(calls))
        refusal = "".join(self.refusal)
        text, thought = split_thinking("".join(self.content))
        if refusal and not text and not calls:
            text, finish = refusal, "content_filter"
        if finish == "tool_calls" and not calls and not text:
            raise ProviderError("the reply announces tool calls and has none", kind="bad_reply",
                                had_output=True)  # fmt: skip
        reasoning = "".join(self.reasoning) or thought
        ids, logprobs = self._tokens()
        return Completion(
            text,
            finish,
            reasoning,
            calls,
            token_ids=ids,
            logprobs=logprobs,
            prompt_token_ids=self.prompt_token_ids,
            top_logprobs=self._alternatives(),
            usage=usage,
            model=model,
        )

    def _tokens(self) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
        values = [_logprob(e.get("logprob")) for e in self.logprobs]
        known = [v for v in values if v is not None]
        logprobs = tuple(known) if known and len(known) == len(values) else None
        ids: tuple[int, ...] | None = tuple(self.token_ids) or _ids_in_tokens(self.logprobs)
        if ids is not None and logprobs is not None and len(ids) != len(logprobs):
            ids = None  # a list that does not line up would mask the wrong tokens
        return ids, logprobs

    def _alternatives(self) -> tuple[Mapping[str, float], ...] | None:
        rows = [_alternatives(e.get("top_logprobs")) for e in self.logprobs]
        return tuple(rows) if any(rows) else None


def _index(value: Any) -> int | None:
    """A call's index, also where it is written as a text; None for anything else."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        return int(value)
    is_index = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_index else None


def _function_of(piece: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call's name and arguments: under `function`, or in the piece itself."""
    function = piece.get("function") or piece.get("custom")
    return function if isinstance(function, Mapping) else piece


def _arguments_of(function: Mapping[str, Any]) -> Any:
    names = ("arguments", "parameters", "input", "args")
    return next((function[n] for n in names if function.get(n) is not None), None)


def _is_call_part(part: Any) -> bool:
    """Whether a part of a content list is a call, as proxies of other APIs pass it on."""
    return isinstance(part, Mapping) and part.get("type") in ("tool_use", "tool_call")


def _whole(pieces: Sequence[str]) -> str:
    """Return a call's arguments from their pieces.

    Some servers begin with an empty object, or say with each piece all that came before; both are
    told from the pieces only where these together are no JSON.
    """
    text = "".join(pieces)
    if len(pieces) < 2 or _is_object(text):
        return text or "{}"
    if pieces[0].strip() in ("{}", "null") and _is_object("".join(pieces[1:])):
        return "".join(pieces[1:])
    grows = all(later.startswith(before) for before, later in pairwise(pieces))
    return pieces[-1] if grows and _is_object(pieces[-1]) else text


def _is_object(text: str) -> bool:
    try:
        return isinstance(loads(text.encode("utf-8", "surrogatepass")), dict)
    except ValueError:
        return False


def _alternatives(row: Any) -> dict[str, float]:
    """A token's alternatives as text to log-probability; what is neither is left out."""
    found: dict[str, float] = {}
    for entry in row if isinstance(row, list) else ():
        value = _logprob(entry.get("logprob")) if isinstance(entry, Mapping) else None
        if value is not None and isinstance(entry.get("token"), str):
            found[entry["token"]] = value
    return found


def _logprob(value: Any) -> float | None:
    """A finite number, or None: NaN and infinities are never kept."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _ids_in_tokens(entries: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
    """vLLM's `return_tokens_as_token_ids` writes each token as `token_id:123`."""
    ids = []
    for entry in entries:
        token = entry.get("token")
        if not isinstance(token, str) or not token.startswith("token_id:"):
            return None
        if not token[9:].isdecimal():
            return None
        ids.append(int(token[9:]))
    return tuple(ids) or None


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _text(value: Any) -> str:
    """Text of a content field: a string, or parts of type text; anything else is nothing."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(
            p["text"] for p in value if isinstance(p, Mapping) and isinstance(p.get("text"), str)
        )
    return ""


def finished(choices: Sequence[ChoiceParts], where: str) -> list[ChoiceParts]:
    """Return the choices that came to an end; one that the server gave up is no reply.

    Raises:
        ProviderError: none did; the first one's cause.
    """
    good: list[ChoiceParts] = []
    failure: ProviderError | None = None
    for choice in choices:
        try:
            finish_of(choice.finish)
        except ProviderError as exc:
            failure = failure or exc
        else:
            good.append(choice)
    if not good and failure is not None:
        raise ProviderError(f"{where}: {failure}", kind=failure.kind, had_output=True) from None
    return good


def reply_bytes(parts: ChoiceParts) -> int:
    """UTF-8 bytes of everything a choice holds, for usage estimates and shares."""
    texts = [*parts.content, *parts.reasoning, *parts.refusal]
    for call in parts.calls.values():
        texts += [call["name"], *call["arguments"]]
    return sum(len(t.encode("utf-8", "surrogatepass")) for t in texts)


def prompt_bytes(request: Request) -> int:
    """UTF-8 bytes of the prompt and its tools, for usage estimates."""
    texts = [m.content for m in request.messages]
    texts += [c.arguments for m in request.messages for c in m.tool_calls]
    texts += [json.dumps(t.to_dict()) for t in request.tools]
    return sum(len(t.encode("utf-8", "surrogatepass")) for t in texts)


def timed_out(where: str, what: str, limit: str, seconds: float) -> ProviderError:
    """The error of a call that took too long, naming the limit to raise."""
    return ProviderError(
        f"{where}: {what} within {seconds:g} s; raise limits.{limit} if the server is only slow",
        kind="timeout",
    )
