"""The calls of a judge's LM in a training run: kept, counted under caps, retried.

Each process of a run keeps its own in `RUN/judge` and has its share of the caps. Does not know what
is judged. Source: own.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tfgrpo.errors import ConfigError
from tfgrpo.lm import open_lm
from tfgrpo.lm.retry import RetryingLM
from tfgrpo.protocols import LM
from tfgrpo.rl import distributed
from tfgrpo.rl.config import TrainConfig
from tfgrpo.store import Budget, Journal, JournaledLM

__all__ = ["JudgeCalls"]


class JudgeCalls:
    """Opens the LMs that a verifier asks for; a journal is made with the first of them.

    A context manager that closes the journal.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._store: Journal | None = None

    def open(self, spec: str = "", **options: Any) -> LM:
        """Return a judge's LM under the run's caps.

        Raises:
            ConfigError: no model is named, or money is capped and its price unknown.
        """
        if not spec:
            raise ConfigError(
                "the verifier asks a model and names none: give it one, such as lm = 'openai:MODEL'"
            )
        lm = open_lm(spec, **options)
        if self._store is None:
            self._store = self._open_journal()
        return RetryingLM(JournaledLM(lm, self._store, prices=self._config.prices or None))

    def _open_journal(self) -> Journal:
        rank, processes = distributed.world()
        caps = self._config.budget.model_dump()
        share = {n: v if v is None or n == "seconds" else v / processes for n, v in caps.items()}
        folder = Path(self._config.run.folder) / "judge"
        return Journal.open(
            folder if processes == 1 else folder / str(rank), create=True, budget=Budget(**share)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._store is not None:
            self._store.close()
