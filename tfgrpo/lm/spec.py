"""Spec strings: one line of text that selects a backend and a model, and `open_lm` that opens it.

    openai:MODEL                    api.openai.com, key from OPENAI_API_KEY
    http://HOST:PORT/v1#MODEL       any OpenAI-compatible server (https too); a key is sent only
                                    where `api_key_env` names its variable
    fleet:NAME                      many such servers of one model; `servers` and `model` are
                                    options, or stand under [fleets.NAME] of the config
    litellm:PROVIDER/MODEL          other providers, through litellm
    vllm:MODEL_OR_PATH              vLLM in this process
    local:smollm2-135m              the embedded model
    local:PATH | local:ORG/NAME     transformers weights, from a folder or the hub (named = wanted)
    scripted:NAME                   deterministic replies, see `tfgrpo.lm.scripted_models`

A few options may stand in the spec itself, `?key=value&…` before the `#` or at the end, so that
one string in a config file says everything: `https://HOST/v1?api_key_env=MY_KEY#model`.

Does not know how any backend works: each is imported when it is opened. Source: own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.redaction import redact

if TYPE_CHECKING:
    from tfgrpo.protocols import LM

Backend = Literal["openai", "fleet", "litellm", "vllm", "local", "scripted"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
FORMS = (
    "openai:MODEL",
    "http://HOST/v1#MODEL",
    "fleet:NAME",
    "litellm:PROVIDER/MODEL",
    "vllm:MODEL_OR_PATH",
    "local:smollm2-135m",
    "local:PATH",
    "local:ORG/NAME",
    "scripted:NAME",
)
_SPEC_OPTIONS: Mapping[str, type] = MappingProxyType(
    {
        "api_key_env": str,
        "api_key_query": str,
        "stream": bool,
        "strict_model": bool,
        "supports_n": bool,
        "device": str,
        "dtype": str,
        "max_rows": int,
    }
)
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed spec string."""

    backend: Backend
    model: str
    base_url: str = ""
    """Of an OpenAI-compatible server; empty means the backend's own."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Options written in the spec."""

    @property
    def text(self) -> str:
        """The spec without options: what ledgers and reports show."""
        return f"{self.base_url}#{self.model}" if self.base_url else f"{self.backend}:{self.model}"


def parse_spec(spec: str) -> Spec:
    """Return the parts of a spec string; nothing is opened or imported.

    >>> parse_spec("http://127.0.0.1:8000/v1#smol").model
    'smol'
    >>> parse_spec("opnai:gpt-x")
    Traceback (most recent call last):
    ...
    tfgrpo.errors.ConfigError: model spec 'opnai:gpt-x': unknown backend 'opnai', did you mean \
'openai'? Allowed: openai:MODEL, http://HOST/v1#MODEL, fleet:NAME, \
litellm:PROVIDER/MODEL, vllm:MODEL_OR_PATH, local:smollm2-135m, local:PATH, local:ORG/NAME, \
scripted:NAME

    Raises:
        ConfigError: unknown backend (names the nearest), no model, a bad URL or option.
    """
    if not isinstance(spec, str):
        raise ConfigError(f"model spec {spec!r} is not a string. Allowed: {', '.join(FORMS)}")
    text = spec.strip()
    if re.match(r"(?i)https?://", text):
        return _parse_url(text)
    backend, colon, rest = text.partition(":")
    if not colon or backend not in BACKENDS:
        raise ConfigError(_unknown_backend(text, backend, bool(colon)))
    model, options = _split_options(text, rest)
    if not model:
        raise _wrong(text, f"no model after {backend + ':'!r}")
    if backend == "litellm" and "/" not in model:
        raise _wrong(text, "litellm needs PROVIDER/MODEL, such as 'litellm:anthropic/claude-…'")
    return Spec(backend, model, options=MappingProxyType(options))


def _wrong(spec: str, why: str) -> ConfigError:
    return ConfigError(redact(f"model spec {spec!r}: {why}. Allowed: {', '.join(FORMS)}"))


def _unknown_backend(text: str, backend: str, has_colon: bool) -> str:
    near = difflib.get_close_matches(backend.lower(), BACKENDS, n=1, cutoff=0.5)
    hint = f", did you mean {near[0]!r}?" if near else "."
    if not has_colon:
        what = f"no backend before the model{hint if near else ', such as openai:' + text + '.'}"
    else:
        what = f"unknown backend {backend!r}{hint}"
    return redact(f"model spec {text!r}: {what} Allowed: {', '.join(FORMS)}")


def _parse_url(text: str) -> Spec:
    head, hash_mark, model = text.partition("#")
    try:
        url = urlsplit(head)
    except ValueError as exc:
        raise _wrong(text, str(exc)) from None
    if not url.hostname:
        raise _wrong(text, "the URL has no host")
    if url.username or url.password:
        raise _wrong(text, "a key or password in the URL is refused; name its variable with "
                     "?api_key_env=NAME")  # fmt: skip
    if not hash_mark or not model:
        raise _wrong(text, "no model after '#', such as http://127.0.0.1:8000/v1#MODEL")
    options, query = _read_options(text, url.query)
    base = urlunsplit((url.scheme.lower(), url.netloc, url.path.rstrip("/"), query, ""))
    model, more = _split_options(text, model)
    return Spec("openai", model, base_url=base, options=MappingProxyType(options | more))


def _split_options(spec: str, rest: str) -> tuple[str, dict[str, Any]]:
    model, mark, query = rest.partition("?")
    options, unknown = _read_options(spec, query)
    if mark and unknown:
        known = ", ".join(_SPEC_OPTIONS)
        raise _wrong(spec, f"unknown option {unknown!r}; the options of a spec are {known}")
    return model.strip(), options


def _read_options(spec: str, query: str) -> tuple[dict[str, Any], str]:
    options: dict[str, Any] = {}
    rest: list[tuple[str, str]] = []
    for key, value in parse_qsl(query, keep_blank_values=True):
        kind = _SPEC_OPTIONS.get(key)
        if kind is None:
            rest.append((key, value))
        elif kind is bool:
            if value.lower() not in _BOOLEANS:
                raise _wrong(spec, f"option {key}={value!r} must be true or false")
            options[key] = _BOOLEANS[value.lower()]
        elif kind is int:
            if not value.isdecimal():
                raise _wrong(spec, f"option {key}={value!r} must be a whole number")
            options[key] = int(value)
        else:
            options[key] = value
    return options, urlencode(rest)


def fleet_options(spec: str, fleets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a config's `[fleets.NAME]` says of a spec `fleet:NAME`; nothing for others.

    Raises:
        ConfigError: as `parse_spec`.
    """
    parsed = parse_spec(spec)
    return dict(fleets.get(parsed.model, {})) if parsed.backend == "fleet" else {}


def open_lm(spec: str, **options: Any) -> LM:
    """Open the LM that a spec string names.

    Keyword options go to the backend's constructor and win over those written in the spec; what
    each takes stands in its docstring (`api_key_env`, `stream`, `device`, `max_rows`, …). No
    request is sent; a local model is loaded at its first call.

    Raises:
        ConfigError: a spec or an option that is wrong.
        ProviderError: the environment variable of the key is unset (kind `auth`).
        MissingExtraError: the backend's library is not installed.
    """
    parsed = parse_spec(spec)
    settings = {**parsed.options, **options}
    build = _BUILDERS[parsed.backend]
    try:
        return build(parsed, settings)
    except TypeError as exc:
        if "unexpected keyword argument" not in str(exc):
            raise
        unknown = str(exc).rpartition("argument ")[2]
        raise ConfigError(
            redact(f"model spec {spec!r}: the {parsed.backend} backend has no option {unknown}")
        ) from exc


def _build_openai(spec: Spec, options: dict[str, Any]) -> LM:
    from tfgrpo.lm.openai import OpenAILM, ServerRules

    rules = {f.name: options.pop(f.name) for f in fields(ServerRules) if f.name in options}
    return OpenAILM(
        spec.model, base_url=spec.base_url or None, rules=ServerRules(**rules), **options
    )


def _build_fleet(spec: Spec, options: dict[str, Any]) -> LM:
    from tfgrpo.lm.fleet.fleet_lm import FleetLM

    if not options.get("servers") or not options.get("model"):
        raise ConfigError(
            f"model spec {spec.text!r}: a fleet needs its servers and its model: set "
            f'[fleets.{spec.model}] servers = ["http://HOST:8000/v1", …] and model = "…", or '
            "give both as options of the role"
        )
    return FleetLM(spec.model, **options)


def _build_litellm(spec: Spec, options: dict[str, Any]) -> LM:
    from tfgrpo.lm.litellm import LiteLLM

    return LiteLLM(spec.model, **options)


def _build_vllm(spec: Spec, options: dict[str, Any]) -> LM:
    from tfgrpo.lm.vllm import VllmLM

    return VllmLM(spec.model, **options)


def _build_local(spec: Spec, options: dict[str, Any]) -> LM:
    from tfgrpo.lm.local.local_lm import LocalLM

    return LocalLM(spec.model, **options)


def _build_scripted(spec: Spec, options: dict[str, Any]) -> LM:
    from tfgrpo.lm.scripted_models import open_script

    return open_script(spec.model, **options)


_BUILDERS = {
    "openai": _build_openai,
    "fleet": _build_fleet,
    "litellm": _build_litellm,
    "vllm": _build_vllm,
    "local": _build_local,
    "scripted": _build_scripted,
}
