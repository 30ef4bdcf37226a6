"""What every part of one learning run shares.

Does not know what is done with it. Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tfgrpo.config.learn import Config
from tfgrpo.experience import ExperienceSettings
from tfgrpo.learning.progress import ProgressView
from tfgrpo.store import Journal
from tfgrpo.tasks import Splits

__all__ = ["LearnRun"]


@dataclass(frozen=True, slots=True)
class LearnRun:
    """Settings, tasks, journal and view of one run."""

    config: Config
    splits: Splits
    settings: ExperienceSettings
    """How libraries are made, injected and bounded; the critic was made with them."""
    store: Journal
    view: ProgressView
