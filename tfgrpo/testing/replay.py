"""Record an LM's replies to a JSONL file, and play them back without it.

One line a draw: the digest of (request, seed, how often this was asked), the request for people,
and the reply. Playing back is exact and needs no model; a call that was not recorded is an error
that names the file, so a changed prompt shows. Does not know models. Source: own.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.protocols import LM, Completion, Request
from tfgrpo.runtime.canonical import canonical_json, digest, jsonable
from tfgrpo.runtime.texts.text_lines import numbered_lines
from tfgrpo.store.codec import completion_from_dict, completion_to_dict


class ReplayLM:
    """Plays a recording back; with `lm` it asks that model for whatever is not recorded yet and
    appends the reply.

    Args:
        path: the JSONL file; it may be absent where `lm` is given.
        lm: the model to record; None only plays back.
        model_id: name in ledgers; None takes the recorded model's.

    Raises:
        ConfigError: no file to play back, or a line that cannot be read.
    """

    def __init__(
        self, path: str | Path, *, lm: LM | None = None, model_id: str | None = None
    ) -> None:
        self._path = Path(path)
        self._lm = lm
        self._replies: dict[str, Completion] = {}
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._model_id = model_id or (lm.model_id if lm is not None else "")
        if self._path.is_file():
            self._read()
        elif lm is None:
            raise ConfigError(f"there is no recording {str(path)!r}, and no model to record")

    def _read(self) -> None:
        with self._path.open(encoding="utf-8", newline="\n") as file:
            text = file.read()
        for number, line, is_whole in numbered_lines(text):
            try:
                row = json.loads(line)
                self._replies[row["key"]] = completion_from_dict(row["reply"])
                self._model_id = self._model_id or row["model_id"]
            except (ValueError, KeyError, TypeError) as exc:
                cut = "" if is_whole else " (the last line is cut off: delete it to go on)"
                raise ConfigError(
                    f"recording {str(self._path)!r}, line {number}: "
                    f"{type(exc).__name__}: {exc}{cut}"
                ) from exc

    @property
    def model_id(self) -> str:
        """The recorded model's name."""
        return self._model_id

    @property
    def identity(self) -> Mapping[str, Any]:
        """The recorded model's identity where it is known, else its name."""
        if self._lm is not None:
            return self._lm.identity
        return {"backend": "replay", "model": self._model_id}

    @property
    def prefers_n(self) -> bool:
        """As the recorded model's."""
        return self._lm.prefers_n if self._lm is not None else False

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return recorded replies; asks the model for missing ones where there is one."""
        keys = [self._key(request, seed) for seed in list(seeds)[:n]]
        missing = [i for i, key in enumerate(keys) if key not in self._replies]
        if missing:
            if self._lm is None:
                raise ProviderError(
                    f"recording {str(self._path)!r} holds no reply to this request "
                    f"({len(self._replies)} replies, last text "
                    f"{request.messages[-1].content!r:.100}); record it again",
                    kind="bad_request",
                )
            made = await self._lm.complete(request, len(missing), [seeds[i] for i in missing])
            for i, reply in zip(missing, made):
                self._keep(keys[i], request, seeds[i], reply)
        found = [self._replies[key] for key in keys if key in self._replies]
        return found

    def _key(self, request: Request, seed: int | None) -> str:
        asked = jsonable(request)
        asked.pop("limits")
        base = digest([asked, seed], 32)
        with self._lock:
            turn = self._asked[base]
            self._asked[base] += 1
        return f"{base}-{turn}"

    def _keep(self, key: str, request: Request, seed: int | None, reply: Completion) -> None:
        row = {
            "key": key,
            "model_id": self._model_id,
            "messages": [m.to_dict() for m in request.messages],
            "seed": seed,
            "reply": completion_to_dict(reply),
        }
        with self._lock:
            self._replies[key] = reply
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(canonical_json(row) + "\n")

    async def aclose(self) -> None:
        """Close the recorded model."""
        if self._lm is not None:
            await self._lm.aclose()
