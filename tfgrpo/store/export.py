"""Groups as files: JSONL with the standard library, Parquet with pyarrow.

One row a group. JSONL holds the group's own JSON form, so reading gives an equal group. Parquet has
flat columns for selecting (ids, stage, rewards, outcomes) and the full record as JSON text in
`group`, which every reader of Parquet, `datasets` included, can load. A file appears whole or not
at all. `.gz` after `.jsonl` is compressed.

Does not know runs. Source: own.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from tfgrpo.errors import ConfigError, MissingExtraError
from tfgrpo.rollout import RolloutGroup
from tfgrpo.store.codec import form_of, plain_json
from tfgrpo.store.disk.files import store_errors

__all__ = ["parquet_library", "read_groups", "write_groups"]

MAX_LINE_BYTES = 256 * 1024 * 1024
"""Longest line of a JSONL file; a longer one is refused before it is held."""
MAX_UNPACKED_BYTES = 16 * 1024 * 1024 * 1024
MAX_RATIO = 1000
"""A compressed file may unpack to so many times its size, for a start of 64 MB and more."""
_BATCH = 256


def write_groups(path: Path | str, groups: Iterable[RolloutGroup]) -> int:
    """Write groups as `.jsonl`, `.jsonl.gz` or `.parquet` and return how many.

    Raises:
        ConfigError: another suffix, or a value that JSON cannot carry.
        StoreError: the file cannot be written; an older one stays as it was.
        MissingExtraError: Parquet without pyarrow.
    """
    target = Path(path)
    kind = _kind(target)
    with store_errors(target, "write"), _whole_file(target) as part:
        if kind == "parquet":
            return _write_parquet(part, groups)
        opener = gzip.open if kind == "gzip" else open
        count = 0
        with opener(part, "wt", encoding="utf-8", newline="\n") as file:
            for group in groups:
                file.write(_group_text(group) + "\n")
                count += 1
        return count


def read_groups(path: Path | str) -> Iterator[RolloutGroup]:
    """Yield the groups of a file one by one.

    Raises:
        ConfigError: no such file, another suffix, or a row that is no group; the message names the
            line (JSONL) or row (Parquet).
        MissingExtraError: Parquet without pyarrow.
    """
    source = Path(path)
    kind = _kind(source)
    if not source.is_file():
        raise ConfigError(f"there is no file {str(source)!r} to read groups from")
    rows = _parquet_rows(source) if kind == "parquet" else _json_rows(source, kind)
    for where, text in rows:
        try:
            yield RolloutGroup.from_dict(json.loads(text))
        except (
            KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError,
        ) as exc:  # fmt: skip
            raise ConfigError(
                f"{source.name}, {where}: not a rollout group ({type(exc).__name__}: {exc})"
            ) from exc


def _group_text(group: RolloutGroup) -> str:
    what = f"group {group.group_id!r}"
    return plain_json(form_of(group, what), what)


def _kind(path: Path) -> str:
    name = path.name.lower()
    for suffix, kind in ((".jsonl", "jsonl"), (".jsonl.gz", "gzip"), (".parquet", "parquet")):
        if name.endswith(suffix):
            return kind
    raise ConfigError(f"{path.name!r}: groups are kept as .jsonl, .jsonl.gz or .parquet")


@contextmanager
def _whole_file(target: Path) -> Iterator[Path]:
    """Write beside the target, then put the file in its place, on the disk before it has its name.

    The file is its owner's alone: prompts and answers may be private.
    """
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
        _sync_folder(target.parent)
    finally:
        part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _json_rows(source: Path, kind: str) -> Iterator[tuple[str, bytes]]:
    with _open_bytes(source, kind) as file:
        total, most = 0, _unpacked_limit(source, kind)
        number = 0
        while line := _line(file, source, number + 1):
            number += 1
            total += len(line)
            if total > most:
                raise ConfigError(
                    f"{source.name}, line {number}: unpacks to more than {most} bytes; refused"
                )
            if line.strip():
                yield f"line {number}", line.removeprefix(b"\xef\xbb\xbf")


def _open_bytes(source: Path, kind: str) -> IO[bytes]:
    if kind == "gzip":
        return cast(IO[bytes], gzip.open(source, "rb"))
    return source.open("rb")


def _line(file: IO[bytes], source: Path, number: int) -> bytes:
    try:
        line = file.readline(MAX_LINE_BYTES + 1)
    except (OSError, EOFError) as exc:
        raise ConfigError(f"{source.name}, line {number}: cannot be read: {exc}") from exc
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(
            f"{source.name}, line {number}: longer than {MAX_LINE_BYTES} bytes; refused"
        )
    return line


def _unpacked_limit(source: Path, kind: str) -> int:
    if kind != "gzip":
        return MAX_UNPACKED_BYTES
    return min(MAX_UNPACKED_BYTES, max(64 * 1024 * 1024, source.stat().st_size * MAX_RATIO))


def parquet_library() -> tuple[Any, Any]:
    """Return pyarrow and its Parquet module.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise MissingExtraError.of("parquet", "reading and writing Parquet", "pyarrow") from exc
    return pyarrow, pyarrow.parquet


def _write_parquet(part: Path, groups: Iterable[RolloutGroup]) -> int:
    arrow, parquet = parquet_library()
    schema = arrow.schema(
        [
            ("group_id", arrow.string()),
            ("task_id", arrow.string()),
            ("stage", arrow.string()),
            ("policy_id", arrow.string()),
            ("context_hash", arrow.string()),
            ("prompt", arrow.string()),
            ("reference", arrow.string()),
            ("answers", arrow.list_(arrow.string())),
            ("outcomes", arrow.list_(arrow.string())),
            ("rewards", arrow.list_(arrow.float64())),
            ("group", arrow.string()),
        ]
    )
    count = 0
    with parquet.ParquetWriter(part, schema, compression="zstd") as writer:
        batch: list[dict[str, Any]] = []
        for group in groups:
            batch.append(_parquet_row(group))
            count += 1
            if len(batch) == _BATCH:
                writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
                batch = []
        writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
    return count


def _parquet_row(group: RolloutGroup) -> dict[str, Any]:
    """Flat columns are for selecting: lone surrogates in them are replaced, in `group` kept."""
    return {
        "group_id": _clean(group.group_id),
        "task_id": _clean(group.task.task_id),
        "stage": _clean(str(group.metadata.get("stage", ""))),
        "policy_id": _clean(group.policy_id),
        "context_hash": group.context.context_hash,
        "prompt": _clean(group.task.text),
        "reference": plain_json(group.task.reference, "reference"),
        "answers": [_clean(r.answer) for r in group.rollouts],
        "outcomes": [r.outcome for r in group.rollouts],
        "rewards": [r.reward for r in group.rollouts],
        "group": _group_text(group),
    }


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _parquet_rows(source: Path) -> Iterator[tuple[str, str]]:
    arrow, parquet = parquet_library()
    try:
        with parquet.ParquetFile(source) as file:
            if "group" not in file.schema_arrow.names:
                raise ConfigError(
                    f"{source.name}: no column 'group'; there are {file.schema_arrow.names}"
                )
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH, columns=["group"]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield f"row {number}", text
    except (arrow.ArrowException, OSError) as exc:
        raise ConfigError(f"{source.name}: cannot be read as Parquet: {exc}") from exc
