"""API keys: made once, kept as scrypt hashes, compared in constant time, withdrawn at once.

A key is `tf_` and 43 characters of 32 random bytes. Its first 8 characters after `tf_` find its
row; the hash decides. A key that was found right is remembered for 60 s as a keyed digest, so that
scrypt's 30 ms are paid once a minute and never on the event loop.

Does not know budgets or routes. Source: RFC 7914 (scrypt); own.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime

from tfgrpo.errors import ConfigError
from tfgrpo.serve.settings import KeySettings
from tfgrpo.serve.wire.errors import ApiError

__all__ = ["KeyRing", "hash_key", "new_key"]

_REMEMBER_S = 60.0
_N, _R, _P = 2**14, 8, 1
ANYBODY = ""
"""Name of the key of clients where no keys are set."""


def new_key() -> str:
    """Return a fresh key."""
    return "tf_" + base64.urlsafe_b64encode(os.urandom(32)).decode("ascii").rstrip("=")


def hash_key(key: str, salt: bytes | None = None) -> str:
    """Return what the settings keep of a key: `scrypt:PREFIX:SALT:HASH`."""
    salt = os.urandom(16) if salt is None else salt
    digest = hashlib.scrypt(key.encode(), salt=salt, n=_N, r=_R, p=_P, dklen=32)
    return f"scrypt:{key[3:11]}:{salt.hex()}:{digest.hex()}"


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    salt: bytes
    digest: bytes
    expires: date | None


class KeyRing:
    """The keys of a gateway.

    Args:
        keys: by name; empty lets anybody in (loopback only, which the start-up checks).
        clock: monotonic seconds.

    Raises:
        ConfigError: a hash or date that cannot be read.
    """

    def __init__(
        self, keys: Mapping[str, KeySettings], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._secret = os.urandom(32)
        self._known: dict[bytes, tuple[str, float]] = {}
        self._revoked: set[str] = set()
        self._rows: dict[str, list[_Row]] = {}
        self.is_open = not keys
        self._expires: dict[str, date] = {}
        for name, key in keys.items():
            prefix, row = _read_row(name, key)
            self._rows.setdefault(prefix, []).append(row)
            if row.expires is not None:
                self._expires[name] = row.expires

    def revoke(self, name: str) -> None:
        """Refuse a key from now on."""
        self._revoked.add(name)

    async def name_of(self, authorization: str) -> str:
        """Return the name of the key that an `Authorization` header holds.

        Raises:
            ApiError: 401.
        """
        if self.is_open:
            return ANYBODY
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key or len(key) > 200:
            raise ApiError("invalid_api_key", "no API key: send Authorization: Bearer tf_…")
        mark = hmac.digest(self._secret, key.encode("utf-8", "replace"), "sha256")
        found = self._known.get(mark)
        if found is not None and self._clock() < found[1]:
            return self._valid(found[0])
        for row in self._rows.get(key[3:11], ()):
            digest = await asyncio.to_thread(_scrypt, key, row.salt)
            if hmac.compare_digest(digest, row.digest):
                if len(self._known) > 10_000:
                    self._known.clear()
                self._known[mark] = (row.name, self._clock() + _REMEMBER_S)
                return self._valid(row.name)
        raise ApiError("invalid_api_key", "the API key is wrong or was withdrawn")

    def _valid(self, name: str) -> str:
        expires = self._expires.get(name)
        if expires is not None and datetime.now(UTC).date() >= expires:
            raise ApiError("invalid_api_key", f"the API key expired on {expires}")
        if name in self._revoked:
            raise ApiError("invalid_api_key", "the API key is wrong or was withdrawn")
        return name


def _scrypt(key: str, salt: bytes) -> bytes:
    return hashlib.scrypt(key.encode("utf-8", "replace"), salt=salt, n=_N, r=_R, p=_P, dklen=32)


def _read_row(name: str, key: KeySettings) -> tuple[str, _Row]:
    try:
        _, prefix, salt, digest = key.hash.split(":")
        expires = date.fromisoformat(key.expires) if key.expires else None
        return prefix, _Row(name, bytes.fromhex(salt), bytes.fromhex(digest), expires)
    except ValueError as exc:
        raise ConfigError(
            f"keys.{name}: {exc}; `tfgrpo serve key new {name}` makes a key and its hash"
        ) from None
