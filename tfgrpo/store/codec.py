"""Values in the journal: JSON text, compressed above half a kilobyte, with a digest beside it.

Text begins as JSON does and compressed text as zlib does, so a value says itself how to read it (in
SQLite its type says so, too). No pickle anywhere. Also the JSON form of a completion, which no
other module needs.

Does not know tables or files. Source: own.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

from tfgrpo.errors import ConfigError
from tfgrpo.messages import ToolCall
from tfgrpo.protocols import Completion
from tfgrpo.rollout import Usage
from tfgrpo.runtime.canonical import jsonable
from tfgrpo.runtime.redaction import redact_known

COMPRESS_ABOVE = 512
"""Bytes of JSON text above which a value is compressed. Below, compression saves no page."""
_LEVEL = 3
"""As small as 6 within 2 %, in less time: most values are a reply of some hundred words."""
DICTIONARY = (
    b'"parts":{"metadata":{"is_truncated":true,"error":"","top_logprobs":[{"prompt_token_ids":['
    b'"logprobs":[-0."token_ids":[12"reasoning":""tool_calls":[{"call_id":"","name":"","arguments":'
    b'"observations":[{"role":"tool","content":""}],"cache_read_tokens":"cache_write_tokens":'
    b'"reasoning_tokens":"is_estimated":true,"cost_usd":0.00'
    b',"seed":"duration_s":0.0{"rollout_id":"g-1","task_id":"t1","steps":[{"action":{"role":'
    b'"assistant","content":"}}],"outcome":"graded","usage":{"uncached_tokens":1,"text_tokens":1,'
    b'"calls":1},"sample_index":1,"score":{"reward":0.0,"feedback":"the answer is ","expected "},'
    b'{"text":"The ","finish":"stop","usage":{"uncached_tokens":,"text_tokens":,"calls":1},"model":'
    b'"'
)
"""What replies and rollouts have in common, for zlib. Never change it: a value that was written
with it cannot be read without it. Values that were written before it was here are read as well."""
_LINE_DIGEST = 32
"""Hexadecimal digits before the text of a line."""
MAX_VALUE_BYTES = 512 * 1024 * 1024
"""Largest text a stored value may unpack to; a file that claims more is damaged or hostile."""

_encode = json.JSONEncoder(
    ensure_ascii=True, allow_nan=False, separators=(",", ":"), check_circular=False
).encode

Packed = tuple[str | bytes, bytes]
"""A stored value and its digest."""


class DamagedValue(ValueError):
    """A stored value does not match its digest."""


def pack(value: Any, what: str = "value") -> Packed:
    """Return the stored form of a plain JSON value.

    Raises:
        ConfigError: the value has no JSON form (NaN, infinity, a foreign type); `what` names it.
    """
    return pack_text(plain_json(value, what))


def plain_json(value: Any, what: str = "value") -> str:
    """Return a value as one line of JSON in ASCII, known secrets removed; raises as `pack`."""
    try:
        return redact_known(_encode(value))
    except (TypeError, ValueError):
        try:
            return redact_known(_encode(jsonable(value)))
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"{what} cannot be kept as JSON: {exc}") from exc


class _Record(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


def form_of(record: _Record, what: str) -> dict[str, Any]:
    """Return a record's JSON form; raises as `pack`."""
    try:
        return record.to_dict()
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{what} cannot be kept as JSON: {exc}") from exc


def pack_text(text: str) -> Packed:
    """Return the stored form of a JSON text in ASCII."""
    data = text.encode("ascii")
    mark = _digest(data)
    if len(data) <= COMPRESS_ABOVE:
        return text, mark
    packer = zlib.compressobj(_LEVEL, zdict=DICTIONARY)
    return packer.compress(data) + packer.flush(), mark


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]


def pack_line(value: Any, what: str = "value") -> str:
    """Return a value as one text behind its digest, for a column without another; raises as
    `pack`."""
    text = plain_json(value, what)
    return _digest(text.encode("ascii")).hex() + text


def unpack_line(line: str) -> Any:
    """Return what `pack_line` was given.

    Raises:
        DamagedValue, ValueError: it does not match its digest, or has none.
    """
    return unpack(line[_LINE_DIGEST:], bytes.fromhex(line[:_LINE_DIGEST]))


def is_compressed(stored: bytes) -> bool:
    """Tell compressed text, which begins as zlib does, from JSON, which never does."""
    return stored[:1] == b"\x78"


def unpack(stored: object, mark: object) -> Any:
    """Return the value of a stored form.

    Raises:
        DamagedValue: it does not match its digest, or unpacks to more than `MAX_VALUE_BYTES`.
    """
    text: str | None = None
    if isinstance(stored, str):
        data = stored.encode("utf-8", "surrogatepass")
        text = stored
    elif isinstance(stored, bytes) and not is_compressed(stored):
        data = stored
    elif not isinstance(stored, bytes):
        raise DamagedValue(f"is of another type ({type(stored).__name__})")
    else:
        unpacker = zlib.decompressobj(zdict=DICTIONARY)
        try:
            data = unpacker.decompress(stored, MAX_VALUE_BYTES)
        except zlib.error as exc:
            raise DamagedValue(f"cannot be unpacked: {exc}") from exc
        if unpacker.unconsumed_tail:
            raise DamagedValue(f"unpacks to more than {MAX_VALUE_BYTES} bytes")
    if _digest(data) != mark:
        raise DamagedValue("does not match its digest")
    return json.loads(data if text is None else text)


@lru_cache(4096)
def column_text(text: str) -> str:
    """Return an id as SQLite text can hold it; different ids stay different.

    Lone surrogates, which SQLite refuses, are kept as JSON escapes behind a mark.
    """
    if text.startswith("\x00json:") or not _is_storable(text):
        return "\x00json:" + json.dumps(text)
    return text


def from_column(text: object) -> str:
    """Return the id that `column_text` was given; of a damaged one, what is left of it."""
    if not isinstance(text, str):
        return "" if text is None else str(text)
    if text.startswith("\x00json:"):
        try:
            return str(json.loads(text[6:]))
        except ValueError:
            return text[6:]
    return text


def _is_storable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def completion_to_dict(completion: Completion) -> dict[str, Any]:
    """Return the JSON form of a reply, empty fields left out.

    Log-probabilities that JSON cannot carry (minus infinity, NaN) are left out as a whole: a paid
    reply is never lost over them.
    """
    row: dict[str, Any] = {"text": completion.text, "finish": completion.finish}
    if completion.reasoning:
        row["reasoning"] = completion.reasoning
    if completion.tool_calls:
        row["tool_calls"] = [c.to_dict() for c in completion.tool_calls]
    if completion.token_ids is not None:
        row["token_ids"] = list(completion.token_ids)
    if completion.logprobs is not None and all(map(math.isfinite, completion.logprobs)):
        row["logprobs"] = list(completion.logprobs)
    if completion.prompt_token_ids is not None:
        row["prompt_token_ids"] = list(completion.prompt_token_ids)
    if completion.top_logprobs is not None:
        row["top_logprobs"] = [
            {t: v for t, v in place.items() if math.isfinite(v)}
            for place in completion.top_logprobs
        ]
    row["usage"] = completion.usage.to_dict()
    if completion.model:
        row["model"] = completion.model
    return row


def completion_from_dict(row: Mapping[str, Any]) -> Completion:
    """Restore a reply from its JSON form."""

    def numbers(name: str) -> tuple[Any, ...] | None:
        return tuple(row[name]) if row.get(name) is not None else None

    return Completion(
        text=row["text"],
        finish=row["finish"],
        reasoning=row.get("reasoning", ""),
        tool_calls=tuple(ToolCall.from_dict(c) for c in row.get("tool_calls", ())),
        token_ids=numbers("token_ids"),
        logprobs=numbers("logprobs"),
        prompt_token_ids=numbers("prompt_token_ids"),
        top_logprobs=numbers("top_logprobs"),
        usage=Usage.from_dict(row["usage"]),
        model=row.get("model", ""),
    )
