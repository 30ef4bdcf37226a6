"""The token with which workers on other machines use a run's endpoint.

It comes from the environment of each machine or from a file there, never from the run: arguments of
remote calls and runtime environments can be read by others. Does not know who asks. Source: own.
"""

from __future__ import annotations

import os
from pathlib import Path

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.redaction import Secret

__all__ = ["FILE_VARIABLE", "VARIABLE", "worker_token"]

VARIABLE = "TFGRPO_WORKER_TOKEN"
FILE_VARIABLE = "TFGRPO_WORKER_TOKEN_FILE"
_SHORTEST = 16


def worker_token() -> Secret | None:
    """Return the token of this machine, or None where there is none.

    Raises:
        ConfigError: the file cannot be read, or the token is short.
    """
    secret = Secret.from_environment(VARIABLE)
    path = os.environ.get(FILE_VARIABLE, "")
    if secret is None and path:
        try:
            secret = Secret(Path(path).read_text(encoding="ascii").strip(), f"file {path}")
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{FILE_VARIABLE}: {path!r} cannot be read: {exc}") from exc
    if secret is not None and len(secret.value) < _SHORTEST:
        raise ConfigError(f"the workers' token {secret} has under {_SHORTEST} characters")
    return secret
