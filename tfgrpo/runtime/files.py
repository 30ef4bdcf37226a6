"""Files that appear whole, for their owner alone, without known secrets, never through a link.

Does not know formats. Source: own.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tfgrpo.runtime.redaction import redact_known
from tfgrpo.runtime.terminal import printable

__all__ = ["write_for_people", "write_whole"]


def write_for_people(path: Path, text: str) -> None:
    """Write text that people read, as `write_whole` does, with control and bidirectional
    characters as visible escapes: a terminal or an editor that shows the file obeys none."""
    write_whole(path, printable(text))


def write_whole(path: Path, text: str) -> None:
    """Write text as UTF-8 (lone surrogates as escapes) with mode 0600, whole or not at all.

    The file is made under a name that nobody can guess and then put in place, so a link that
    stands at `path` is replaced and its target left alone.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(redact_known(text).encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
