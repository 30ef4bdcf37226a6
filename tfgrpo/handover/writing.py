"""Writes a run for another trainer: data, reward, command, verifier and a card.

Does not know the trainers' forms. Source: own.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfgrpo.context import render_messages
from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.handover.bundle import SPLIT_FILES, Bundle, identity
from tfgrpo.handover.scoring import SETTINGS, TASKS, RunVerifier
from tfgrpo.handover.targets import TARGETS, Target, write_rows
from tfgrpo.lm.wire import message_json
from tfgrpo.protocols import Verifier
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import jsonable
from tfgrpo.runtime.import_string import noted_module_folder
from tfgrpo.runtime.redaction import redact

__all__ = ["TARGETS", "hand_over"]

CARD = "README.md"
VERIFIED = "verified.jsonl"


def hand_over(bundle: Bundle, to: str, folder: Path | str) -> Path:
    """Write a run for a trainer and return the folder that holds it.

    Args:
        bundle: the run, as `read_bundle` returns it.
        to: a name in `TARGETS`.
        folder: where to write; must be new or empty.

    Raises:
        ConfigError: an unknown name, a folder that holds something, or a verifier that is not the
            run's.
        StoreError: a file cannot be written.
        MissingExtraError: the form is Parquet and pyarrow is absent.
    """
    if to not in TARGETS:
        raise ConfigError(f"no trainer {to!r}: there are {', '.join(TARGETS)}")
    target, root = TARGETS[to], Path(folder)
    place = root / bundle.name if target.package else root
    try:
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise ConfigError(f"{str(root)!r} is not empty: name a new folder")
        place.mkdir(parents=True, exist_ok=True)
        with _whole_or_empty(root):
            _write(bundle, target, root, place)
    except OSError as exc:
        raise StoreError(f"{str(root)!r} cannot be written: {exc}") from exc
    return root


def _write(bundle: Bundle, target: Target, root: Path, place: Path) -> None:
    _write_verifier(bundle, place)
    verifier = _own_verifier(bundle, place)
    verified = bundle.verified(verifier.reward_range[1])
    for split, stem in SPLIT_FILES.items():
        rows = [target.row(row, bundle) for row in bundle.of(split)]
        write_rows(place / f"{stem}.{target.suffix}", rows)
    for name, text in target.files.items():
        into = root if name == "pyproject.toml" else place
        (into / name).write_text(text.replace("NAME", bundle.name), encoding="utf-8")
    write_rows(place / VERIFIED, _supervised(bundle, verified))
    (root / CARD).write_text(card(bundle, target, len(verified)), encoding="utf-8")


@contextlib.contextmanager
def _whole_or_empty(root: Path) -> Iterator[None]:
    """Empty a folder again where not all could be written, so that it can be named once more."""
    try:
        yield
    except BaseException:
        for path in root.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise


def _write_verifier(bundle: Bundle, place: Path) -> None:
    config = bundle.material.config
    settings = {
        name: _plain(getattr(config, name).model_dump(mode="json", exclude_unset=True))
        for name in ("policy", "judge")
    }
    settings["verifier"] = _plain(jsonable(dict(config.verifier)))
    settings["fleets"] = _plain(jsonable(dict(config.fleets)))
    modules = noted_module_folder(bundle.material.folder)
    row = {"settings": settings, "modules": str(modules) if modules else None}
    (place / SETTINGS).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    write_rows(place / TASKS, [row.task.to_dict() for row in bundle.rows])


def _plain(settings: Any) -> Any:
    """Settings without secrets and without what is None."""
    kept = {k: v for k, v in dict(settings).items() if v is not None}
    return json.loads(redact(json.dumps(kept)))


def _own_verifier(bundle: Bundle, place: Path) -> Verifier:
    """Return the verifier that was written, refused where another one judged the run's groups."""
    used = {
        str(g.metadata["verifier_id"])
        for g in bundle.material.practice_groups
        if "verifier_id" in g.metadata
    }
    verifier = RunVerifier.load(place).verifier
    if used and verifier.verifier_id not in used:
        raise ConfigError(
            f"the settings of {str(bundle.material.folder)!r} describe verifier "
            f"{verifier.verifier_id!r}, but "
            f"{', '.join(sorted(used))!r} judged its rollouts: name it, as with --verifier "
            '\'{kind = "function", function = "module:name"}\''
        )
    return verifier


def _supervised(bundle: Bundle, verified: Sequence[tuple[Task, str]]) -> list[dict[str, Any]]:
    """Verified replies as chats, each with and without what the library adds."""
    system = bundle.material.config.policy.system
    prompts = {row.task.task_id: row.turns for row in bundle.of("practice")}
    rows = []
    for task, reply in verified:
        said = {"role": "assistant", "content": reply}
        bare = [message_json(m) for m in render_messages(task.messages, system=system)]
        forms = {"bare": [*bare, said]}
        if bundle.with_library:
            forms["library"] = [*prompts[task.task_id], said]
        rows += [{"task_id": task.task_id, "form": f, "messages": m} for f, m in forms.items()]
    return rows


def card(bundle: Bundle, target: Target, verified: int) -> str:
    """Return the card of a handed-over run with so many verified replies, as Markdown."""
    material = bundle.material
    library = f"version {material.version_id}" if bundle.with_library else "none"
    return _CARD.format(
        name=bundle.name,
        reads=target.reads,
        start=target.start.replace("NAME", bundle.name),
        run=material.folder.name,
        rows=identity(bundle),
        library=library,
        failed=target.failed,
        practice=len(material.practice),
        gate=len(material.gate),
        test=len(material.test),
        suffix=target.suffix,
        verified=verified,
        verifier=json.dumps(_plain(jsonable(dict(material.config.verifier)))),
    )


_CARD = """# {name}

Written by `tfgrpo handover` from run `{run}` for {reads}. Start: `{start}`

| what | |
| --- | --- |
| rows | {rows} |
| training | `train.{suffix}`: {practice} practice tasks |
| validation | `validation.{suffix}`: {gate} gate tasks |
| held back | {test} test tasks: neither rows nor references are here |
| library in the prompts | {library} |
| verifier | `{verifier}` |
| a reply that the verifier fails on | {failed} |
| verified replies | `verified.jsonl`: {verified}, as chats with and without the library |

What travels: tasks, references, system text and library as text, hints as a column, and the run's
own verifier, which the reward function asks (`tfgrpo` must be installed where it runs, with the
module of a verifier of kind `function`). What does not: schedulers of hints, credit over turns,
rollouts that did not pass, the run's ledger and caps. The tasks keep the licence that they had.
"""
