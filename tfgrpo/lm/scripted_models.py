"""The named scripts behind `scripted:NAME`: deterministic models without weights.

    scripted:echo           the last user text
    scripted:coin           `yes` or `no` by (request, seed)
    scripted:digits         a number from 0 to 9 by (request, seed)
    scripted:silent         an empty reply
    scripted:cut            a reply cut at its token limit
    scripted:refuse         a content filter's refusal
    scripted:down           a server that is overloaded at every call
    scripted:locked         a server that rejects the key
    scripted:FILE.json      `{"user text": "reply" | ["reply", …]}`; a list is drawn from by seed

Does not know tokens. Source: own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.lm.scripted import Reply, Script, ScriptedLM
from tfgrpo.protocols import Completion, Request
from tfgrpo.runtime.canonical import derive_seed, digest


def _last_user(request: Request) -> str:
    return next((m.content for m in reversed(request.messages) if m.role == "user"), "")


def _draw(request: Request, seed: int | None, sides: int) -> int:
    return derive_seed([m.to_dict() for m in request.messages], seed) % sides


_SCRIPTS: Mapping[str, Callable[[Request, int | None], Reply]] = MappingProxyType(
    {
        "echo": lambda request, seed: _last_user(request),
        "coin": lambda request, seed: ("no", "yes")[_draw(request, seed, 2)],
        "digits": lambda request, seed: str(_draw(request, seed, 10)),
        "silent": lambda request, seed: "",
        "cut": lambda request, seed: Completion("I was about to", finish="length"),
        "refuse": lambda request, seed: Completion("", finish="content_filter"),
        "down": lambda request, seed: ProviderError(
            "scripted:down answers every call with 503", kind="overloaded", status=503
        ),
        "locked": lambda request, seed: ProviderError(
            "scripted:locked answers every call with 401", kind="auth", status=401
        ),
    }
)


class _FileScriptLM(ScriptedLM):
    """A scripted LM whose identity covers the content of its file."""

    def __init__(self, path: Path, replies: Mapping[str, Any], *, latency_s: float = 0.0) -> None:
        self._digest = digest(replies, 16)
        super().__init__(
            _from_mapping(path, replies), model_id=f"scripted:{path.name}", latency_s=latency_s
        )

    @property
    def identity(self) -> Mapping[str, Any]:
        """Backend, name and a digest of the replies."""
        return {**super().identity, "script": self._digest}


def _from_mapping(path: Path, replies: Mapping[str, Any]) -> Script:
    def reply(request: Request, seed: int | None) -> Reply:
        text = _last_user(request)
        if text not in replies:
            return ProviderError(f"{path.name} has no reply to {text!r:.200}", kind="bad_request")
        found = replies[text]
        return found if isinstance(found, str) else str(found[_draw(request, seed, len(found))])

    return reply


def open_script(name: str, *, script: Script | None = None, latency_s: float = 0.0) -> ScriptedLM:
    """Return the scripted LM of that name, or one that runs the given `script` under that name.

    Raises:
        ConfigError: no such script, or a file that holds no mapping of texts to replies.
    """
    if script is not None:
        return ScriptedLM(script, model_id=f"scripted:{name}", latency_s=latency_s)
    if name in _SCRIPTS:
        return ScriptedLM(_SCRIPTS[name], model_id=f"scripted:{name}", latency_s=latency_s)
    path = Path(name)
    if path.suffix != ".json":
        raise ConfigError(
            f"model spec 'scripted:{name}': no script {name!r}. Allowed: "
            f"{', '.join(_SCRIPTS)}, or a .json file of replies"
        )
    return _FileScriptLM(path, _read_replies(path), latency_s=latency_s)


def _read_replies(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ConfigError(f"model spec 'scripted:{path}': there is no file {str(path)!r}")
    try:
        replies = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ConfigError(f"model spec 'scripted:{path}': not JSON: {exc}") from exc
    if not isinstance(replies, dict) or not all(
        isinstance(v, str) or (isinstance(v, list) and v) for v in replies.values()
    ):
        raise ConfigError(
            f"model spec 'scripted:{path}': must be an object of texts to a reply or a list of them"
        )
    return replies
