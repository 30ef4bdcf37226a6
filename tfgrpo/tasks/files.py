"""Task files: rows to `Task` records, with file and line in every message.

Does not know splits or runs. Source: own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message, Role
from tfgrpo.rollout import Task


def read_tasks(path: Path | str) -> list[Task]:
    """Read tasks from JSONL: `task_id`, `prompt` (or `messages`), `reference`, `metadata`.

    Raises:
        ConfigError: no file, no rows, a line that is not an object, a missing or repeated id;
            the message names file and line.
    """
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, row in _rows(Path(path)):
        where = f"{str(path)!r} line {number}"
        task_id = row.get("task_id", row.get("id"))
        prompt = row.get("prompt", row.get("messages"))
        if not isinstance(task_id, (str, int)) or task_id == "":
            raise ConfigError(f"{where}: task_id is {task_id!r}: a non-empty text is needed")
        task_id = str(task_id)
        if task_id in seen:
            raise ConfigError(
                f"{where}: task_id {task_id!r} was used on line {seen[task_id]}: ids must be unique"
            )
        seen[task_id] = number
        if isinstance(prompt, list):
            prompt = tuple(_turn(turn, where) for turn in prompt)
        if not prompt or not isinstance(prompt, (str, tuple)):
            raise ConfigError(f"{where}: prompt is {prompt!r}: a text or a list of turns is needed")
        metadata = row.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise ConfigError(f"{where}: metadata is {metadata!r}: an object is needed")
        tasks.append(Task(task_id, prompt, row.get("reference"), metadata))
    if not tasks:
        raise ConfigError(f"{str(path)!r} holds no tasks: one JSON object a line is needed")
    return tasks


def _turn(value: Any, where: str) -> Message:
    role = value.get("role") if isinstance(value, dict) else None
    content = value.get("content") if isinstance(value, dict) else None
    if role not in get_args(Role) or not isinstance(content, (str, type(None))):
        raise ConfigError(
            f"{where}: turn {value!r:.100} is not an object with a role "
            f"({', '.join(get_args(Role))}) and a text as content"
        )
    try:
        return Message.from_dict(value)
    except (KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{where}: turn {value!r:.100}: {type(exc).__name__}: {exc}") from exc


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"no task file {str(path)!r}") from None
    except (UnicodeDecodeError, IsADirectoryError) as exc:
        raise ConfigError(f"{str(path)!r} cannot be read as UTF-8 text: {exc}") from exc
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as exc:
            raise ConfigError(f"{str(path)!r} line {number} is not JSON: {exc}") from exc
        if not isinstance(row, dict):
            raise ConfigError(f"{str(path)!r} line {number} is not a JSON object: {line!r:.100}")
        yield number, row
