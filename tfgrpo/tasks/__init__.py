"""Task files, splits by task id, and refusal of splits that overlap."""

from tfgrpo.tasks.files import read_tasks
from tfgrpo.tasks.splits import Overlap, Splits, overlaps, split_tasks

__all__ = ["Overlap", "Splits", "overlaps", "read_tasks", "split_tasks"]
