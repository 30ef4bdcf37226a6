"""Outcome files: our JSON lines, groups files, run journals, RouterBench, LLMRouterBench.

A bad line is an error that names file, line and field; nothing is skipped in silence. Pickled
tables are refused. Does not know what the outcomes are for.
Sources: column names of RouterBench (arXiv 2403.12031) and LLMRouterBench (arXiv 2601.07206)
tables.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from tfgrpo.errors import ConfigError, boundary
from tfgrpo.rollout import RolloutGroup
from tfgrpo.routing.records import ModelInfo, SuccessCount, outcomes_of_groups

__all__ = ["Format", "read_models", "read_outcomes"]

Format = Literal["auto", "jsonl", "groups", "run", "routerbench", "llmrouterbench"]

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
    if not path.exists():
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
    return [_outcome(row, f"{path}:{n}", success_at) for n, row in _json_lines(path)]


def read_models(path: str | Path) -> list[ModelInfo]:
    """Read prices and families: a JSON list of objects with `name` and any of `family`,
    `input_usd_per_mtok`, `output_usd_per_mtok`; other fields are ignored.

    Raises:
        ConfigError: not such a list.
    """
    with boundary(ConfigError, f"models file {str(path)!r}"):
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(rows, list) or not all(isinstance(r, dict) and "name" in r for r in rows):
        raise ConfigError(f"models file {str(path)!r}: expected a JSON list of objects with 'name'")
    fields = ("name", "family", "input_usd_per_mtok", "output_usd_per_mtok")
    return [ModelInfo(**{k: r[k] for k in fields if k in r}) for r in rows]


def _kind(path: Path) -> Format:
    if path.is_dir():
        return "run" if (path / "run.db").exists() else "llmrouterbench"
    name = path.name.removesuffix(".gz")
    if name.endswith((".pkl", ".pickle")):
        raise ConfigError(
            f"{str(path)!r} is a pickle, which runs code when read: convert it once, for instance "
            f"with "
            "pandas.read_pickle(...).to_json(..., orient='records', lines=True)"
        )
    if name.endswith(".parquet"):
        return "groups"
    if name.endswith(".csv"):
        return "routerbench"
    if name.endswith(".json"):
        return "llmrouterbench"
    for _, row in _json_lines(path):
        if "rollouts" in row and "task" in row:
            return "groups"
        return "routerbench" if "eval_name" in row and "sample_id" in row else "jsonl"
    raise ConfigError(f"{str(path)!r} is empty: it needs one JSON object a line")


def _open_text(path: Path) -> io.TextIOBase:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with boundary(ConfigError, f"{str(path)!r}"), _open_text(path) as file:
        for n, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as exc:
                raise ConfigError(f"{path}:{n}: not JSON ({exc}): one object a line") from exc
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{n}: {type(row).__name__}, expected an object")
            yield n, row


def _number(value: Any, where: str, name: str) -> float:
    if isinstance(value, bool):
        return float(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: {name} is {value!r}; allowed is a number") from None
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
                f"{where}: {name} is {row.get(name)!r}; allowed is a text that is not empty"
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
    for name in ("successes", "trials", "output_tokens", "cost_usd", "at"):
        if name in known:
            known[name] = _number(known[name], where, name)
    for name in ("prompt_id", "dataset"):
        if name in known:
            known[name] = str(known[name])
    try:
        return SuccessCount(**known)
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from exc


def _routerbench(path: Path, success_at: float | None) -> Iterator[SuccessCount]:
    """One line a prompt, one column a model: score, `MODEL|total_cost` beside it."""
    for where, row in _wide_rows(path):
        models = [n.removesuffix("|total_cost") for n in row if n.endswith("|total_cost")]
        if "prompt" not in row or not models:
            raise ConfigError(
                f"{where}: a RouterBench table has 'prompt' and columns 'MODEL' and "
                f"'MODEL|total_cost'; "
                f"found {sorted(row)[:8]}"
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
                "cost_usd": row[f"{model}|total_cost"] or None,
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
        except ValueError:
            return text
        return "\n".join(str(t) for t in turns)
    return text


def _wide_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.name.removesuffix(".gz").endswith(".csv"):
        for n, row in _json_lines(path):
            yield f"{path}:{n}", row
        return
    csv.field_size_limit(_CSV_LIMIT)
    with _open_text(path) as file:
        for n, row in enumerate(csv.DictReader(file), 2):
            yield f"{path}:{n}", dict(row)


def _llmrouterbench(path: Path, success_at: float | None) -> Iterator[SuccessCount]:
    """One file a (data set, model, split): `records` with query, score, tokens and cost."""
    with boundary(ConfigError, f"{str(path)!r}"):
        whole = json.loads(path.read_text(encoding="utf-8"))
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
