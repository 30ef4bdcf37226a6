"""Where a model comes from, and where a trained one goes: names and licences of the model hub.

Does not know how models are trained or written. Source: own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tfgrpo.errors import MissingExtraError, StoreError

__all__ = ["Origin", "origin_of", "push"]

_KNOWN = {"smollm2-135m": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")}


@dataclass(frozen=True, slots=True)
class Origin:
    """The model that training started from."""

    name: str
    """As the settings call it."""
    hub_id: str = ""
    """ORG/NAME; empty where it is on no hub that we know of."""
    licence: str = ""

    def card_lines(self) -> list[str]:
        """Return the lines of a card's head that name it; what is not known has no line."""
        lines = [f"base_model: {self.hub_id}"] if self.hub_id else []
        return lines + ([f"license: {self.licence}"] if self.licence else [])


def origin_of(name: str, *, hub_id: str = "", licence: str = "") -> Origin:
    """Return where a model comes from.

    Args:
        name: `smollm2-135m`, a folder, or `ORG/NAME`.
        hub_id: given by the settings.
        licence: given by the settings.
    """
    known = _KNOWN.get(name, ("", ""))
    folder = Path(name)
    found = known[0]
    if not found and folder.is_dir():
        found = _written_in(folder)
    elif not found and name.count("/") == 1 and not name.startswith((".", "/")):
        found = name
    return Origin(name, hub_id or found, licence or known[1])


def _written_in(folder: Path) -> str:
    """Return the hub id that a folder's config names, where it is one."""
    try:
        row = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    name = str(row.get("_name_or_path") or "") if isinstance(row, dict) else ""
    return name if name.count("/") == 1 and not name.startswith((".", "/")) else ""


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a model's folder to the hub; return its address.

    Raises:
        StoreError: the hub refuses or cannot be reached; the folder is whole.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError as exc:
        raise MissingExtraError.of("rl", "run.push_to_hub", "huggingface_hub") from exc
    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except Exception as exc:  # the client raises its own and its transport's errors
        raise StoreError(
            f"the model is in {str(folder)!r}, and {repository!r} could not be written "
            f"({type(exc).__name__}: {exc}): check the name and `hf auth whoami`, then "
            f"`hf upload {repository} {folder}`"
        ) from exc
    return f"https://huggingface.co/{repository}"
