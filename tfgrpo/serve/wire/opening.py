"""From a spec string to an upstream: a server, a fleet of them, or a model of this process.

Does not know how any of them answers. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfgrpo.lm import open_lm, parse_spec
from tfgrpo.serve.wire.fleet import FleetUpstream
from tfgrpo.serve.wire.upstream import OFFICIAL_URL, HttpUpstream, LocalUpstream, Upstream

__all__ = ["open_upstream"]


def open_upstream(spec: str, options: Mapping[str, Any]) -> Upstream:
    """Open what a spec names; nothing is sent.

    Raises:
        ConfigError, ProviderError, MissingExtraError: as `open_lm`.
    """
    parsed = parse_spec(spec)
    merged = {**parsed.options, **options}
    if parsed.backend == "openai":
        return HttpUpstream(parsed.model, base_url=parsed.base_url or OFFICIAL_URL, **merged)
    if parsed.backend == "fleet":
        return FleetUpstream(parsed.model, **merged)
    return LocalUpstream(open_lm(spec, **options), parsed.text, parsed.model)
