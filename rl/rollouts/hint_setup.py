"""Builds the hint scheduler of `[hints]`, and has a model write the texts where it says so.

Texts are written once, before training, and kept in `RUN/hints.json`, so that a resumed run has the
same ones. Does not know schedulers or how a reply is read. Source: own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfgrpo.errors import StoreError
from tfgrpo.hints.settings import Writer, make_scheduler, writer_of
from tfgrpo.hints.writer import Asking, Written, write_form, write_hints
from tfgrpo.hints.writer_forms import SCAFFOLD, strategies_form
from tfgrpo.protocols import LM, HintScheduler, Sampling
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import canonical_json, digest

FILE = "hints.json"


def prepare(
    config: TrainConfig, tasks: Sequence[Task], parts: LoadedModel
) -> tuple[list[Task], HintScheduler | None]:
    """Return the training tasks, with hints where a model writes them, and the scheduler.

    Raises:
        ConfigError: a wrong section.
        ProviderError: the writer failed.
        StoreError: the kept hints cannot be read or written.
    """
    if not config.hints:
        return list(tasks), None
    writer = writer_of(config.hints)
    if writer is None:
        return list(tasks), make_scheduler(config.hints, tasks=tasks)
    made, figures = _written(config, writer, tasks, parts)
    return made, make_scheduler(config.hints, figures, made)


def policy_lm(parts: LoadedModel, *, max_rows: int = 64) -> LM:
    """Return the weights that are trained, as they are now, as a text model."""
    from tfgrpo.lm.local.loading import LocalModel
    from tfgrpo.lm.local.local_lm import LoadedWeights, LocalLM
    from tfgrpo.rl.generation.generator import GroupGenerator

    decoder = parts.decoder
    loaded = LocalModel(
        model=None,
        tokenizer=parts.tokenizer,
        source=parts.name,
        dtype=str(decoder.embed.dtype).removeprefix("torch."),
        context_tokens=decoder.shape.context,
        eos_ids=parts.eos_ids,
    )
    generator = GroupGenerator(
        decoder, eos_ids=parts.eos_ids, detokenize=parts.text_of, max_rows=max_rows
    )
    return LocalLM(parts.name, loaded=LoadedWeights(loaded, generator, "policy"))


def _written(
    config: TrainConfig, writer: Writer, tasks: Sequence[Task], parts: LoadedModel
) -> tuple[list[Task], dict[str, float]]:
    path = Path(config.run.folder) / FILE
    key = digest([writer.to_json(), config.run.seed, [t.to_dict() for t in tasks]], 16)
    kept = _read(path, key)
    if kept is None:
        written = asyncio.run(_ask(config, writer, tasks, parts))
        kept = {"key": key, "figures": _figures(written), "hints": _rows(tasks, written.tasks)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(canonical_json(kept) + "\n", encoding="utf-8")
        except OSError as exc:
            raise StoreError(f"hints cannot be kept in {str(path)!r}: {exc.strerror}") from exc
    rows = kept["hints"]
    made = [replace(t, metadata={**t.metadata, **rows[t.task_id]}) for t in tasks]
    return made, dict(kept["figures"])


async def _ask(
    config: TrainConfig, writer: Writer, tasks: Sequence[Task], parts: LoadedModel
) -> Written:
    from tfgrpo.lm import open_lm
    from tfgrpo.lm.retry import RetryingLM

    lm = policy_lm(parts) if writer.is_policy else RetryingLM(open_lm(writer.lm))
    asking = Asking(
        "self" if writer.is_policy else "teacher",
        writer.retries,
        Sampling(temperature=1.0, max_tokens=writer.max_tokens),
        config.run.seed,
        writer.solution_key,
    )
    try:
        if writer.what == "hints":
            return await write_hints(tasks, lm, **asking.options())
        key = str(config.hints.get("strategies_key", "strategies"))
        form = SCAFFOLD if writer.what == "scaffold" else strategies_form(writer.count, key)
        return await write_form(tasks, lm, form, asking)
    finally:
        await lm.aclose()


def _figures(written: Written) -> dict[str, float]:
    figures = {
        "written_replies": float(written.replies),
        "written_leaked": float(written.leaked),
        "written_fallbacks": float(len(written.fallbacks)),
        "written_without": float(len(written.without)),
    }
    if written.parse_rate is not None:
        figures["parse_rate"] = written.parse_rate
    return figures


def _rows(before: Sequence[Task], after: Sequence[Task]) -> dict[str, dict[str, Any]]:
    """What writing added to each task's metadata."""
    return {
        new.task_id: {k: v for k, v in new.metadata.items() if old.metadata.get(k) != v}
        for old, new in zip(before, after, strict=True)
    }


def _read(path: Path, key: str) -> Mapping[str, Any] | None:
    """Return the kept hints, or None where there are none of this writer and these tasks."""
    if not path.exists():
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return kept if kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise StoreError(
            f"the kept hints in {str(path)!r} cannot be read ({exc}); delete the file to have them "
            "written again"
        ) from exc
