"""Task files: rows to `Task` records, with file and line in every message.

Does not know splits or runs. Source: own.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from tfgrpo.errors import ConfigError, boundary
from tfgrpo.messages import Message, Role
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import integer_of
from tfgrpo.runtime.json_text import shown
from tfgrpo.runtime.texts.text_file import read_text_file

PROMPT_KEYS = ("prompt", "messages", "question", "input")
"""Names under which a row may hold its prompt; the first that is there counts."""
REFERENCE_KEYS = ("reference", "answer", "output", "expected")
"""Names under which a row may hold the right answer."""
_ID_KEYS = ("task_id", "id")


def read_tasks(path: Path | str) -> list[Task]:
    """Read tasks from JSON lines, a JSON list or CSV.

    A row has a prompt (`prompt`, `messages`, `question` or `input`), and may have `task_id` (or
    `id`; else its place counts), a reference (`reference`, `answer`, `output` or `expected`) and
    `metadata`, an object. In CSV all other columns are metadata.

    Raises:
        ConfigError: no file, no rows, a row of another form, or a repeated id; the message names
            file and line, which keys are wanted and which were found.
    """
    path = Path(path)
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, row in _rows(path):
        where = f"{str(path)!r} line {number}"
        task = _task(row, number, where)
        if task.task_id in seen:
            raise ConfigError(
                f"{where}: task_id {task.task_id!r} was used on line {seen[task.task_id]}: ids "
                "must be unique"
            )
        seen[task.task_id] = number
        tasks.append(task)
    if not tasks:
        raise ConfigError(
            f"{str(path)!r} holds no tasks: JSON lines, a JSON list or CSV with a column 'prompt'"
        )
    return tasks


def _task(row: Mapping[str, Any], number: int, where: str) -> Task:
    task_id = next((row[k] for k in _ID_KEYS if k in row), f"task-{number}")
    if not isinstance(task_id, (str, int)) or isinstance(task_id, bool) or task_id == "":
        raise ConfigError(f"{where}: task_id is {shown(task_id)}: a non-empty text is needed")
    key = next((k for k in PROMPT_KEYS if k in row), None)
    prompt = row[key] if key else None
    if isinstance(prompt, list):
        prompt = tuple(_turn(turn, where) for turn in prompt)
    if not prompt or not isinstance(prompt, (str, tuple)):
        rest = row.get("metadata")  # where the further columns of a CSV file are
        keys = [*(k for k in row if k != "metadata"), *(rest if isinstance(rest, dict) else ())]
        told = f"{key} is {shown(prompt)}" if key else f"no prompt; keys are {', '.join(keys)}"
        raise ConfigError(
            f"{where}: {told}: a text or a list of turns is needed under one of "
            f"{', '.join(PROMPT_KEYS)}"
        )
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ConfigError(f"{where}: metadata is {shown(metadata)}: an object is needed")
    reference = next((row[k] for k in REFERENCE_KEYS if k in row and k != key), None)
    try:
        name = str(task_id)
    except ValueError as exc:  # thousands of digits
        raise ConfigError(f"{where}: task_id cannot be used as a text: {exc}") from exc
    return Task(name, prompt, reference, metadata)


def _turn(value: Any, where: str) -> Message:
    role = value.get("role") if isinstance(value, dict) else None
    content = value.get("content") if isinstance(value, dict) else None
    if role not in get_args(Role) or not isinstance(content, (str, type(None))):
        raise ConfigError(
            f"{where}: turn {shown(value, 100)} is not an object with a role "
            f"({', '.join(get_args(Role))}) and a text as content"
        )
    try:
        return Message.from_dict(value)
    except (KeyError, TypeError, AttributeError) as exc:
        why = f"{type(exc).__name__}: {exc}"
        raise ConfigError(f"{where}: turn {shown(value, 100)}: {why}") from exc


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with boundary(ConfigError, f"task file {str(path)!r}"):  # a name may be none for a file
        if not path.exists():
            raise ConfigError(f"no task file {str(path)!r}")
    text = read_text_file(path).replace("\r\n", "\n").replace("\r", "\n")
    if path.suffix.lower() == ".csv":
        yield from _csv_rows(text, path)
        return
    if text.lstrip().startswith("["):
        yield from _list_rows(text, path)
        return
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_int=integer_of)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(
                f"{str(path)!r} line {number} is not JSON: {exc}; JSON lines, a JSON list, or CSV "
                "under a name that ends in .csv"
            ) from exc
        yield number, _object(row, path, number)


def _object(row: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{str(path)!r} line {number} is not a JSON object: {shown(row, 100)}")
    return row


def _list_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        rows = json.loads(text, parse_int=integer_of)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{str(path)!r} is not JSON: {exc}") from exc
    for number, row in enumerate(rows, 1):
        yield number, _object(row, path, number)


def _csv_cells(reader: csv.DictReader[str], path: Path) -> Iterator[dict[str | Any, str | Any]]:
    try:
        yield from reader
    except csv.Error as exc:
        raise ConfigError(f"{str(path)!r} line {reader.line_num} is not CSV: {exc}") from exc


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a CSV file with a header; `;` and tab are found from the header line."""
    header = text.partition("\n")[0]
    delimiter = max(",;\t", key=header.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    own = {*_ID_KEYS, *PROMPT_KEYS, *REFERENCE_KEYS}
    for row in _csv_cells(reader, path):
        if None in row or None in row.values():
            raise ConfigError(
                f"{str(path)!r} line {reader.line_num}: the row has not as many cells as the "
                f"header ({', '.join(reader.fieldnames or ())})"
            )
        metadata = {k: v for k, v in row.items() if k not in own}
        yield reader.line_num, {**{k: v for k, v in row.items() if k in own}, "metadata": metadata}
