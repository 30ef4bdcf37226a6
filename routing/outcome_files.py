"""Outcome files: our JSON lines, groups files, run journals, RouterBench, LLMRouterBench.

A bad line is an error that names file, line and field; nothing is skipped in silence. Pickled
tables are refused. Does not know what the outcomes are for.
Sources: column names of RouterBench (arXiv 2403.12031) and LLMRouterBench (arXiv 2601.07206)
tables.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from tfgrpo.errors import ConfigError, boundary
from tfgrpo.rollout import RolloutGroup
from tfgrpo.routing.records import ModelInfo, SuccessCount, outcomes_of_groups
from tfgrpo.runtime.texts.text_file import read_text_file
from tfgrpo.store.postgres.places import is_run

__all__ = ["Format", "parse_outcomes", "read_models", "read_outcomes"]

Format = Literal["auto", "jsonl", "csv", "groups", "run", "routerbench", "llmrouterbench"]

log = logging.getLogger(__name__)

_FIELDS = ("prompt", "model", "successes", "trials", "prompt_id", "dataset", "output_tokens",
           "cost_usd", "at")  # fmt: skip
_ALIASES = {
    "query": "prompt", "task": "prompt", "text": "prompt", "model_name": "model", "policy": "model",
    "policy_id": "model", "id": "prompt_id", "task_id": "prompt_id", "query_id": "prompt_id",
    "score": "reward", "performance": "reward", "task_name": "dataset", "cost": "cost_usd",
    "completion_tokens": "output_tokens", "step": "at",
}  # fmt: skip
_CSV_LIMIT = 16 * 1024 * 1024
_SEPARATOR_LINE = re.compile(r"sep=(.)\r?")
"""A first line that tells a spreadsheet how cells are separated."""
_DECIMAL_COMMA = re.compile(r"\s*[+-]?\d+,\d+\s*")
_TEXT_COLUMNS = frozenset({"prompt", "model", "prompt_id", "dataset", "sample_id", "eval_name"})


def read_outcomes(
    path: str | Path, *, format: Format = "auto", success_at: float | None = None
) -> list[SuccessCount]:
    """Return the outcomes of a file, a folder of result files, or a run folder.

    `auto` tells the formats apart by name and first line. `success_at` is the reward from which a
    rollout counts as a success; without it rewards must lie in [0, 1].

    Raises:
        ConfigError: the path, a line or a value is wrong; the message names it.
    """
    path = Path(path)
    if format not in get_args(Format):
        raise ConfigError(f"format {format!r} is unknown: use {', '.join(get_args(Format))}")
    if not (path.exists() or is_run(path)):
        raise ConfigError(f"{str(path)!r} does not exist: give a file of outcomes or a run folder")
    kind = _kind(path) if format == "auto" else format
    if kind == "run":
        return _of_run(path, success_at)
    if kind == "llmrouterbench":
        files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"{str(path)!r} holds no .json result file")
        return [row for file in files for row in _llmrouterbench(file, success_at)]
    if kind == "routerbench":
        return list(_routerbench(path, success_at))
    if kind == "groups":
        return outcomes_of_groups(_groups(path), success_at=success_at)
    if kind == "csv":
        return list(_long_table(path, success_at))
    return parse_outcomes(read_text_file(path), str(path), success_at)


def read_models(path: str | Path) -> list[ModelInfo]:
    """Read prices and families: a JSON list of objects with `name` and any of `family`,
    `input_usd_per_mtok`, `output_usd_per_mtok`; other fields are ignored.

    Raises:
        ConfigError: not such a list.
    """
    with boundary(ConfigError, f"models file {str(path)!r}"):
        rows = json.loads(read_text_file(Path(path)))
    if not isinstance(rows, list) or not all(isinstance(r, dict) and "name" in r for r in rows):
        raise ConfigError(f"models file {str(path)!r}: expected a JSON list of objects with 'name'")
    fields = ("name", "family", "input_usd_per_mtok", "output_usd_per_mtok")
    return [ModelInfo(**{k: r[k] for k in fields if k in r}) for r in rows]


def _kind(path: Path) -> Format:
    if is_run(path):
        return "run"
    if path.is_dir():
        return "llmrouterbench"
    name = path.name.removesuffix(".gz")
    if name.endswith((".pkl", ".pickle")):
        raise ConfigError(
            f"{str(path)!r} is a pickle, which runs code when read: convert it once, for instance "
            f"with "
            "pandas.read_pickle(...).to_json(..., orient='records', lines=True)"
        )
    if name.endswith(".parquet"):
        return "groups"
    if name.endswith((".csv", ".tsv")):
        header = _Table(path).header
        return "routerbench" if any(n.endswith("|total_cost") for n in header) else "csv"
    if name.endswith(".json"):
        return "llmrouterbench"
    for _, row in _json_lines(path):
        if "rollouts" in row and "task" in row:
            return "groups"
        return "routerbench" if "eval_name" in row and "sample_id" in row else "jsonl"
    raise ConfigError(f"{str(path)!r} is empty: it needs one JSON object a line")


def parse_outcomes(text: str, where: str, success_at: float | None = None) -> list[SuccessCount]:
    """Return the outcomes of JSON lines; equal texts are kept once in memory.

    Raises:
        ConfigError: a line or a value is wrong; the message names it.
    """
    seen: dict[str, str] = {}
    found = []
    for n, row in _rows_of(text, where):
        if isinstance(row.get("prompt"), str):
            row["prompt"] = seen.setdefault(row["prompt"], row["prompt"])
        found.append(_outcome(row, f"{where}:{n}", success_at))
    return found


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    return _rows_of(read_text_file(path), str(path))


def _rows_of(text: str, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for n, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{where}:{n}: not JSON ({exc}): one object a line") from exc
        if not isinstance(row, dict):
            raise ConfigError(f"{where}:{n}: {type(row).__name__}, expected an object")
        yield n, row


def _number(value: Any, where: str, name: str) -> float:
    if isinstance(value, bool):
        return float(value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: {name} is {value!r:.100}; allowed is a number") from None
    if not math.isfinite(number):
        raise ConfigError(
            f"{where}: {name} is {value!r}; allowed is a finite number: leave the row out where "
            f"there "
            "is no reward"
        )
    return number


def _success(reward: float, where: str, success_at: float | None) -> float:
    if success_at is not None:
        return float(reward >= success_at)
    if not 0 <= reward <= 1:
        raise ConfigError(
            f"{where}: reward {reward:g} lies outside 0 to 1; give success_at, the reward from "
            f"which a "
            "rollout counts as a success"
        )
    return reward


def _outcome(raw: Mapping[str, Any], where: str, success_at: float | None) -> SuccessCount:
    row: dict[str, Any] = {}
    for name, value in raw.items():
        row.setdefault(_ALIASES.get(name, name), value)
    for name in ("prompt", "model"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise ConfigError(
                f"{where}: {name} is {row.get(name)!r}; allowed is a text that is not empty; "
                f"fields found are {sorted(raw)}, wanted are prompt, model and reward (or "
                "successes and trials)"
            )
    if "successes" not in row:
        rewards = row.get("rewards", row.get("reward"))
        if rewards is None:
            raise ConfigError(
                f"{where}: neither 'successes' (with 'trials') nor 'reward' or 'rewards' is given; "
                f"fields are {sorted(raw)}"
            )
        values = rewards if isinstance(rewards, list) else [rewards]
        if not values:
            raise ConfigError(f"{where}: 'rewards' is empty; leave the row out")
        numbers = [_success(_number(v, where, "reward"), where, success_at) for v in values]
        row["successes"], row["trials"] = math.fsum(numbers), float(len(numbers))
    known = {k: row[k] for k in _FIELDS if row.get(k) is not None}
    if row.get("metadata") is not None:
        if not isinstance(row["metadata"], dict):
            raise ConfigError(f"{where}: metadata is {row['metadata']!r}; allowed is an object")
        known["metadata"] = {str(k): str(v) for k, v in row["metadata"].items()}
    for name in ("successes", "trials", "output_tokens", "cost_usd", "at"):
        if name in known:
            known[name] = _number(known[name], where, name)
    for name in ("prompt_id", "dataset"):
        if name in known:
            known[name] = str(known[name])
    try:
        return SuccessCount(**known)
    except (ConfigError, TypeError) as exc:  # a field is missing
        raise ConfigError(f"{where}: {exc}") from exc


def _routerbench(path: Path, success_at: float | None) -> Iterator[SuccessCount]:
    """One line a prompt, one column a model: score, `MODEL|total_cost` beside it."""
    for where, row in _wide_rows(path):
        models = [n.removesuffix("|total_cost") for n in row if n.endswith("|total_cost")]
        lost = [m for m in models if m not in row]
        if "prompt" not in row or not models or lost:
            raise ConfigError(
                f"{where}: a RouterBench table has 'prompt' and columns 'MODEL' and "
                f"'MODEL|total_cost'; "
                f"found {sorted(row)[:8]}"
                + (f", without a score column for {lost}" if lost else "")
            )
        for model in models:
            if row.get(model) in (None, ""):
                continue
            raw = {
                "prompt": _prompt_text(row["prompt"]),
                "prompt_id": row.get("sample_id"),
                "dataset": row.get("eval_name"),
                "model": model,
                "reward": row[model],
                "cost_usd": row.get(f"{model}|total_cost") or None,
            }
            yield _outcome(raw, f"{where} column {model!r}", success_at)


def _prompt_text(value: Any) -> str:
    """RouterBench stores a prompt as the text of a list of turns."""
    if isinstance(value, list):
        return "\n".join(str(v) for v in value)
    text = str(value)
    if text.startswith("["):
        try:
            turns = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return "\n".join(str(t) for t in turns)
    return text


def _wide_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.name.removesuffix(".gz").endswith((".csv", ".tsv")):
        yield from _Table(path).rows()
        return
    for n, row in _json_lines(path):
        yield f"{path}:{n}", row


class _Table:
    """A CSV file with a header; comma, semicolon or tab, told apart by the header."""

    def __init__(self, path: Path) -> None:
        csv.field_size_limit(_CSV_LIMIT)
        self._path, text = path, read_text_file(path)
        head, _, rest = text.partition("\n")
        mark = max(",;\t", key=head.count)
        if said := _SEPARATOR_LINE.fullmatch(head):
            mark, text = said[1], rest
        self._lines_before = int(bool(said))
        self._has_decimal_commas = mark != ","
        self._lines = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
        self.header = [name.strip() for name in next(self._lines, [])]
        twice = sorted(n for n, times in Counter(self.header).items() if times > 1)
        if twice:
            raise ConfigError(f"{path}:1: columns {twice} occur twice: name every column once")

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield place and cells of each line.

        Raises:
            ConfigError: a line has other cells than the header.
        """
        try:
            for cells in self._lines:
                where = self._where()
                if not any(c.strip() for c in cells):
                    continue
                if len(cells) != len(self.header):
                    raise ConfigError(
                        f"{where}: {len(cells)} cells under a header of {len(self.header)} "
                        f"({', '.join(self.header[:8])}): put quotes around cells that hold the "
                        "separator"
                    )
                named = zip(self.header, cells, strict=True)
                yield where, {name: self._cell(name, cell) for name, cell in named}
        except csv.Error as exc:
            raise ConfigError(f"{self._where()}: {exc}") from exc

    def _where(self) -> str:
        return f"{self._path}:{self._lines_before + self._lines.line_num}"

    def _cell(self, name: str, cell: str) -> str:
        """Return a cell as it stands; a decimal comma, as spreadsheets write it beside semicolons,
        becomes a point."""
        is_text = _ALIASES.get(name, name) in _TEXT_COLUMNS
        if self._has_decimal_commas and not is_text and _DECIMAL_COMMA.fullmatch(cell):
            return cell.replace(",", ".")
        return cell


def _long_table(path: Path, success_at: float | None) -> Iterator[SuccessCount]:
    """One line an outcome: prompt, model and reward, or successes and trials."""
    table = _Table(path)
    names = {_ALIASES.get(n, n) for n in table.header}
    counts = "reward" in names or {"successes", "trials"} <= names
    if not {"prompt", "model"} <= names or not counts:
        raise ConfigError(
            f"{path}:1: found the columns {', '.join(table.header) or 'none'}; wanted are "
            "'prompt', 'model' and 'reward' (or 'successes' and 'trials'), a line an outcome, or "
            "the wide form of RouterBench: 'prompt', and 'MODEL' and 'MODEL|total_cost' a model"
        )
    for where, row in table.rows():
        yield _outcome({k: v for k, v in row.items() if v != ""}, where, success_at)


def _llmrouterbench(path: Path, success_at: float | None) -> Iterator[SuccessCount]:
    """One file a (data set, model, split): `records` with query, score, tokens and cost."""
    with boundary(ConfigError, f"{str(path)!r}"):
        whole = json.loads(read_text_file(path))
    if isinstance(whole, list) and whole and all(isinstance(r, dict) for r in whole):
        if whole and all("name" in r for r in whole) and not any("prompt" in r for r in whole):
            raise ConfigError(
                f"{str(path)!r} is a list of models with prices, not of outcomes: give it as "
                "--models, and a file of outcomes as data"
            )
        for n, row in enumerate(whole):
            yield _outcome(row, f"{path} row {n}", success_at)
        return
    if not isinstance(whole, dict) or not isinstance(whole.get("records"), list):
        raise ConfigError(
            f"{str(path)!r}: an LLMRouterBench result has a list 'records'; it has none"
        )
    if whole.get("demo"):
        log.warning("%s: marked as a demo run, left out", path)
        return
    unscored = sum(isinstance(r, dict) and r.get("score") is None for r in whole["records"])
    if unscored:
        log.warning("%s: %d records without a score, left out", path, unscored)
    for n, record in enumerate(whole["records"]):
        where = f"{path} record {n}"
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: {type(record).__name__}, expected an object")
        if record.get("score") is None:
            continue
        dataset = str(whole.get("dataset_name", ""))
        where_id = f"{dataset}/{whole.get('split', '')}/{record.get('index')}"
        raw = {
            "prompt": record.get("origin_query") or record.get("prompt"),
            "prompt_id": where_id if "index" in record else None,
            "dataset": dataset,
            "model": whole.get("model_name"),
            "reward": record.get("score"),
            "output_tokens": record.get("completion_tokens"),
            "cost_usd": record.get("cost"),
        }
        yield _outcome(raw, where, success_at)


def _groups(path: Path) -> Iterable[RolloutGroup]:
    from tfgrpo.store import read_groups

    return read_groups(path)


def _of_run(path: Path, success_at: float | None) -> list[SuccessCount]:
    from tfgrpo.store import Journal

    with Journal.open(path, readonly=True) as store:
        return outcomes_of_groups(store.groups(), success_at=success_at)
