"""The run's own verifier, for the reward functions of other trainers.

A handed-over folder holds the settings of the verifier and the tasks with their references; a
reward function names a task by its id and gets the reward of a reply. Works inside and outside of
running event loops and from many threads. Does not know trainers. Source: own.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from tfgrpo.config.learn import Config, RoleConfig
from tfgrpo.errors import ConfigError, VerifierError
from tfgrpo.execute.judging import judge, refuse_group_verifier
from tfgrpo.learning.components import configured_verifier, open_role
from tfgrpo.lm.retry import RetryingLM
from tfgrpo.messages import Message
from tfgrpo.protocols import LM, Verifier
from tfgrpo.rollout import Rollout, Step, Task
from tfgrpo.runtime.import_string import add_module_folder
from tfgrpo.tasks.files import read_tasks

__all__ = ["SETTINGS", "TASKS", "RunVerifier"]

SETTINGS = "verifier.json"
TASKS = "tasks.jsonl"


class RunVerifier:
    """Scores replies to a run's tasks as the run did.

    Args:
        tasks: by id, with references.
        verifier: judges replies.
        timeout_s: wall time of one verification, seconds.
    """

    def __init__(
        self, tasks: Mapping[str, Task], verifier: Verifier, *, timeout_s: float = 120.0
    ) -> None:
        self.tasks = dict(tasks)
        self.verifier = verifier
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Read a folder that `hand_over` wrote.

        Raises:
            ConfigError: a file is missing or wrong, the verifier's module is not here, or it judges
                whole groups.
        """
        folder = Path(folder)
        try:
            row = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{str(folder / SETTINGS)!r} cannot be read: {exc}") from exc
        for modules in (folder, Path(row.get("modules") or folder)):
            add_module_folder(modules)
        config = Config.from_mapping(row["settings"], str(folder / SETTINGS))

        def lm_of(role: RoleConfig) -> LM:
            return RetryingLM(open_role(config, role))

        verifier = configured_verifier(config, lm_of)
        if verifier is None:
            raise ConfigError(
                f"{str(folder / SETTINGS)!r} names no verifier: kind 'none' has no reward to hand "
                "over; learn with a verifier first"
            )
        refuse_group_verifier(verifier, "the reward of another trainer")
        tasks = {task.task_id: task for task in read_tasks(folder / TASKS)}
        return cls(tasks, verifier)

    async def score_async(self, task_id: str, reply: str) -> float | None:
        """Return the reward of a reply, None where the verifier failed.

        Raises:
            VerifierError: no such task.
        """
        if task_id not in self.tasks:
            raise VerifierError(f"no task {task_id!r} was handed over")
        attempt = Rollout(f"{task_id}-handed", task_id, steps=(Step(Message("assistant", reply)),))
        judged = await judge(attempt, self.tasks[task_id], self.verifier, timeout_s=self._timeout_s)
        return judged.reward

    def score(self, task_id: str, reply: str) -> float | None:
        """Return the reward of a reply; as `score_async`, from code that does not await."""
        return self._run(self.score_async(task_id, reply)).result()

    def _run(self, work: Coroutine[Any, Any, float | None]) -> Future[float | None]:
        # One loop for all calls: connections of a judge's LM belong to the loop they began in.
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="tfgrpo-rewards", daemon=True
                ).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)
