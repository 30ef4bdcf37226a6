"""The library as something that travels: JSON, Markdown for people, a ready prompt text.

The JSON carries the card (models, scores with intervals, sampling, limits), the entries and the
hash of what they render to; the loader renders again and refuses a file whose prompt would be
another. Loading runs nothing and trusts nothing: a library of strangers is shown and scanned
first, and can be loaded with every entry in quarantine.
Does not know runs or models. Idea: model cards (Mitchell et al. 2019); hash check (own).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from tfgrpo.context import Context, Placement, render_messages
from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.experience.claim import Claim
from tfgrpo.experience.deployment import (
    Question,
    anthropic_request,
    openai_messages,
    plain_prompt,
    turns_of,
)
from tfgrpo.experience.guards import Guards
from tfgrpo.experience.library import Library
from tfgrpo.messages import Message
from tfgrpo.rollout import Usage
from tfgrpo.runtime.canonical import canonical_json, digest
from tfgrpo.runtime.files import write_whole
from tfgrpo.runtime.terminal import printable

FORMAT = "tfgrpo.artefact"
FORMAT_VERSION = 1
_PROBE = (Message("user", "<task>"),)
"""What stands in a task's place when the prompt is hashed and shown."""
_MAX_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class Card:
    """What a stranger needs to know before use. All values are JSON."""

    name: str = ""
    models: Mapping[str, str] = field(default_factory=dict)
    """Role (policy, critic, judge) to model id."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """How the policy is to draw in use: its own settings, not practice's."""
    tasks: Mapping[str, Any] = field(default_factory=dict)
    """What the tasks are, how many of each split, the verifier."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """Test-split figures with intervals, for the library and for none."""
    cost: Mapping[str, Any] = field(default_factory=dict)
    limits: tuple[str, ...] = ()
    """Where it was not tested or does not help, one sentence each."""
    licence: str = ""
    created: str = ""
    """UTC date."""
    package_version: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "models": dict(self.models),
            "sampling": dict(self.sampling),
            "tasks": dict(self.tasks),
            "scores": dict(self.scores),
            "cost": dict(self.cost),
            "limits": list(self.limits),
            "licence": self.licence,
            "created": self.created,
            "package_version": self.package_version,
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Card:
        """Restore from the JSON form; unknown keys are left out."""
        known = Card().to_dict().keys() & row.keys()
        values = {key: row[key] for key in known}
        if "limits" in values:
            values["limits"] = tuple(values["limits"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Artefact:
    """A library with its card and the way it is injected."""

    library: Library
    card: Card = field(default_factory=Card)
    placement: Placement = "system"
    template: str = "lessons"
    system: str = ""
    """The agent's own system text, which the lessons follow."""

    @property
    def context(self) -> Context:
        """The whole library as a context."""
        return self.library.context(placement=self.placement, template=self.template)

    @property
    def render_hash(self) -> str:
        """Fixed by every byte that this library adds to, and stands beside in, a prompt."""
        return digest([m.to_dict() for m in self.messages(_PROBE)], 32)

    def messages(self, question: Question) -> tuple[Message, ...]:
        """Return the prompt for a question, as it was practised.

        Args:
            question: a text, a `Task`, or turns as records or dictionaries.

        Raises:
            ConfigError: it is none of these.
        """
        return render_messages(turns_of(question), self.context, system=self.system)

    def for_openai(self, question: Question) -> list[dict[str, str]]:
        """Return the `messages` of an OpenAI-compatible request; raises like `messages`."""
        return openai_messages(self.messages(question))

    def for_anthropic(self, question: Question) -> dict[str, Any]:
        """Return `system` and `messages` for Anthropic's endpoint; raises like `messages`."""
        return anthropic_request(self.messages(question))

    @property
    def instructions(self) -> str:
        """What stands before a question, as one text without marks of turns.

        For frameworks that take a single instruction. Where examples were practised as chat turns,
        `for_openai` is what was measured and this is not.
        """
        *before, question = self.messages(_PROBE)
        beside = question.content.replace("<task>", "").strip()  # lessons placed in the user's turn
        rest = (Message("system", beside),) if beside else ()
        return plain_prompt((*before, *rest))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        row = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "card": self.card.to_dict(),
            "placement": self.placement,
            "template": self.template,
            "system": self.system,
            "render_hash": self.render_hash,
            "library": self.library.to_dict(),
        }
        return row | {"sha256": digest(row)}

    def markdown(self) -> str:
        """Return the card and the entries for people."""
        return _markdown(self)

    def prompt_text(self) -> str:
        """Return the prompt around `<task>`, one block a turn, ready to paste."""
        blocks = [f"--- {m.role} ---\n{m.content}" for m in self.messages(_PROBE)]
        return "\n".join(blocks) + "\n"


def export_artefact(artefact: Artefact, folder: Path | str) -> dict[str, Path]:
    """Write the library in every form into a folder: `library.json`, which loads again;
    `library.md` for people; `prompt.txt` with marks of turns; `messages.json`, the chat turns
    around `<task>`; `instructions.txt`, one text without marks.

    `library.md` is for people: control and bidirectional characters in it are visible escapes.
    `prompt.txt` is exactly what a model gets. Each file is written beside its place and moved
    there, so a reader sees the old or the new one.

    Raises:
        StoreError: the folder cannot be written.
    """
    folder = Path(folder)
    texts = {
        "library.json": json.dumps(artefact.to_dict(), indent=1, ensure_ascii=True) + "\n",
        "library.md": printable(artefact.markdown()),
        "prompt.txt": artefact.prompt_text(),
        "messages.json": json.dumps(artefact.for_openai("<task>"), indent=1) + "\n",
        "instructions.txt": artefact.instructions + "\n",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(folder / name, text)
    except OSError as exc:
        raise StoreError(f"artefact folder {str(folder)!r} cannot be written: {exc}") from exc
    return {name: folder / name for name in texts}


def load_artefact(path: Path | str, *, quarantine: bool = False) -> Artefact:
    """Read an artefact and check that it still renders to what was practised.

    Args:
        path: `library.json`, or the folder that holds it.
        quarantine: load every entry as quarantined, for a library of strangers: nothing reaches a
            prompt until an entry is activated.

    Raises:
        ConfigError: not an artefact, damaged, too new, or its prompt would differ.
        StoreError: it cannot be read.
    """
    path = Path(path)
    is_run = any((path / name).is_file() for name in ("run.db", "store.json"))
    if is_run and not (path / "library.json").is_file():
        raise ConfigError(
            f"run {str(path)!r} holds no library.json: it has not ended, and the same `tfgrpo "
            f"learn` goes on. `tfgrpo library show {path}` says what it proposed so far"
        )
    path = path / "library.json" if path.is_dir() else path
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{str(path)!r} has more than {_MAX_BYTES:,} bytes: not a library")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise StoreError(
            f"no library at {str(path)!r}: give a finished run's folder, an exported folder or a "
            "library.json; `tfgrpo runs list` shows the runs here"
        ) from None
    except OSError as exc:
        raise StoreError(f"artefact {str(path)!r} cannot be read: {exc}") from exc
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{str(path)!r} is not JSON: {exc}") from exc
    artefact = from_row(row, str(path))
    return held(artefact) if quarantine else artefact


def from_row(row: Any, where: str) -> Artefact:
    """Restore an artefact from its JSON form, checking format, digest and render hash.

    Raises:
        ConfigError: any of them does not fit.
    """
    if not isinstance(row, dict) or row.get("format") != FORMAT:
        raise ConfigError(f"{where} is no artefact: its format should read {FORMAT!r}")
    version = row.get("format_version", 0)
    if not isinstance(version, int):
        raise ConfigError(f"{where} is damaged: its format_version is {version!r:.80}")
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{where}: format {version} is newer than this package reads "
            f"({FORMAT_VERSION}): install a newer tfgrpo"
        )
    try:
        body = {key: value for key, value in row.items() if key != "sha256"}
        if digest(body) != row["sha256"]:
            raise ConfigError(f"{where}: its content does not fit its sha256; it was changed")
        artefact = Artefact(
            Library.from_dict(row["library"]),
            Card.from_dict(row["card"]),
            row["placement"],
            row["template"],
            row["system"],
        )
        stated, rendered = row["render_hash"], artefact.render_hash
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        if isinstance(exc, ConfigError):
            raise
        raise ConfigError(f"{where} is damaged: {type(exc).__name__}: {exc}") from exc
    if rendered != stated:
        raise ConfigError(
            f"{where}: its entries render to {rendered}, practised was {stated}: this "
            "version of the package words prompts otherwise. Use the version that the card names "
            f"({artefact.card.package_version or 'unknown'}), or learn and gate again"
        )
    return artefact


def held(artefact: Artefact) -> Artefact:
    """Return the artefact with every shown entry in quarantine."""
    library = artefact.library
    for entry in library.shown:
        library = library.with_status(
            entry.experience_id, "quarantined", reason="loaded from elsewhere, not yet looked at"
        )
    return replace(artefact, library=library)


def scan(library: Library) -> list[tuple[str, str]]:
    """Return (id, finding) for each shown entry that the guards would hold back or refuse.

    A worked example is read turn by turn: its own marks of roles are no claim of one.
    """
    guards = Guards(max_words=10_000)
    found = []
    for entry in library.shown:
        texts = [m.content for m in entry.turns] or [entry.text]
        findings = [guards.check(text) for text in texts if text.strip()]
        reasons = dict.fromkeys(f.reason for f in findings if f.verdict != "pass")
        found += [(entry.experience_id, reason) for reason in reasons]
    return found


def _markdown(artefact: Artefact) -> str:
    card, library = artefact.card, artefact.library
    lines = [f"# {card.name or 'Experience library'}", ""]
    rows = {
        "version": library.version_id,
        "render hash": artefact.render_hash,
        "entries": str(len(library.shown)),
        "placement": artefact.placement,
        "licence": card.licence or "not stated",
        "created": card.created or "not stated",
        "tfgrpo": card.package_version or "not stated",
    }
    lines += [f"- {name}: {value}" for name, value in rows.items()]
    sections = {
        "Models": card.models,
        "Sampling in use": card.sampling,
        "Tasks": card.tasks,
        "Scores": card.scores,
        "Cost": card.cost,
    }
    for title, values in sections.items():
        if values:
            lines += ["", f"## {title}", ""]
            lines += [f"- {line}" for key, value in values.items() for line in _words(key, value)]
    lines += ["", "## Limits", ""]
    lines += [f"- {limit}" for limit in card.limits] or ["- none stated"]
    lines += ["", "## Entries", ""]
    for entry in library.entries:
        value = "" if entry.value is None else f", value {entry.value.estimate:+.3f}"
        lines.append(f"### {entry.experience_id} ({entry.kind}, {entry.status}{value})")
        lines += ["", *("    " + line for line in entry.body.split("\n")), ""]
        lines += [f"trust {entry.trust}; {_origin(entry.provenance.rollout_ids)}", ""]
        if not entry.claim.is_empty:
            lines += [_rests_on(entry.claim), ""]
    return "\n".join(lines)


def _rests_on(claim: Claim) -> str:
    """Say in a line what an entry rests on."""
    words = [claim.state, f"topic {claim.topic or 'none'}"]
    words += [f"for {', '.join(claim.support)}"] if claim.support else []
    words += [f"against {', '.join(claim.against)}"] if claim.against else []
    return "; ".join(w for w in words if w)


def _origin(rollouts: Sequence[str]) -> str:
    shown = ", ".join(rollouts[:3]) or "none"
    more = f" and {len(rollouts) - 3} more" if len(rollouts) > 3 else ""
    return f"from rollouts {shown}{more}"


def _words(key: str, value: Any) -> list[str]:
    """Return a part of the card in words, one line each."""
    if isinstance(value, Mapping) and {"estimate", "low", "high"} <= value.keys():
        level, tasks = value.get("level", 0.95), value.get("n_tasks", "?")
        return [
            f"{key}: {value['estimate']:.3f} ({100 * level:.4g}% interval {value['low']:.3f} to "
            f"{value['high']:.3f}, {tasks} tasks)"
        ]
    if key == "rows" and isinstance(value, Sequence) and not isinstance(value, str):
        return [_cost_line(row) for row in value if isinstance(row, Mapping)]
    if isinstance(value, Mapping):
        return [f"{key}: " + ", ".join(f"{k} {_plain(v)}" for k, v in value.items())]
    return [f"{key}: {_plain(value)}"]


def _cost_line(row: Mapping[str, Any]) -> str:
    usage = Usage.from_dict(row.get("usage") or {})
    cost = "money unknown" if usage.cost_usd is None else f"${usage.cost_usd:.4f}"
    return (
        f"{row.get('stage')}, {row.get('model')}: {usage.calls:,} calls, "
        f"{usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens, {cost}"
    )


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else canonical_json(value)


def package_version() -> str:
    """Return the installed version of this package; empty in a bare checkout."""
    try:
        return installed_version("tfgrpo")
    except PackageNotFoundError:
        return ""
