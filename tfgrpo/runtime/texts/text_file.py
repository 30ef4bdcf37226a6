"""Text files as people save them: UTF-8 or UTF-16, with and without a mark, packed or not.

Does not know formats. Source: own.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from tfgrpo.errors import ConfigError, boundary

__all__ = ["read_text_file"]

_MOST_RATIO = 200
"""Times its size that a packed file may unpack to, where that is more than `_FREE_BYTES`."""
_FREE_BYTES = 64 << 20
_MOST_BYTES = 4 << 30
_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


def read_text_file(path: Path) -> str:
    """Return the text of a file without byte-order marks, unpacked where its name ends in `.gz`.

    Raises:
        ConfigError: it cannot be read, unpacks to far more than it holds, or is in an encoding that
            it does not say; the message names line and remedy.
    """
    with boundary(ConfigError, f"{str(path)!r}"):
        raw = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
    encoding = next((name for mark, name in _MARKS.items() if raw.startswith(mark)), "utf-8")
    try:
        return raw.decode(encoding).lstrip("\ufeff")
    except UnicodeDecodeError as exc:
        line = raw[: exc.start].decode(encoding, "ignore").count("\n") + 1
        raise ConfigError(
            f"{str(path)!r} line {line}: byte {raw[exc.start]:#04x} is not {encoding}: "
            "save the file as UTF-8 (from Latin-1: iconv -f latin1 -t utf-8 FILE)"
        ) from exc


def _unpacked(path: Path) -> bytes:
    most = min(_MOST_BYTES, max(_FREE_BYTES, path.stat().st_size * _MOST_RATIO))
    pieces: list[bytes] = []
    size = 0
    with gzip.open(path, "rb") as file:
        while piece := file.read(1 << 20):
            size += len(piece)
            if size > most:
                raise ConfigError(
                    f"{str(path)!r} unpacks to more than {most >> 20} MiB, far more than such "
                    "files hold; unpack it yourself if you trust it"
                )
            pieces.append(piece)
    return b"".join(pieces)
