"""A worker's inside: takes works, contexts and units as messages, sends rollouts back.

    in   {"work": {…}}   {"context": {…}, "hash": …}   {"forget": hash}
         {"unit": {…}, "work": digest, "number": 7}    {"cancel": 7}
    out  {"number": 7, "rollout": {…}} …   {"number": 7, "end": true}   or   {"error": {…}}

Does not know how messages travel. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.errors import ConfigError, ExecutorError, TfgrpoError, boundary
from tfgrpo.execute.local import LocalExecutor
from tfgrpo.execute.protocol import Unit
from tfgrpo.runtime.import_string import add_module_folder, load_object
from tfgrpo.workers.codec import error_to_dict
from tfgrpo.workers.remote_lm import EndpointClient, RemoteLM
from tfgrpo.workers.work import WorkSpec

__all__ = ["Workbench"]


class Workbench:
    """Runs units for whoever sends them; works are built when their first unit comes.

    Args:
        send: takes a message for the run.
        endpoint: URL of the run's endpoint.
        token: of the run.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None], endpoint: str, token: str) -> None:
        self._send = send
        self._client = EndpointClient(endpoint, token)
        self._specs: dict[str, WorkSpec] = {}
        self._built: dict[str, LocalExecutor] = {}
        self._contexts: dict[str, Context] = {EMPTY_CONTEXT.context_hash: EMPTY_CONTEXT}
        self._running: dict[int, asyncio.Task[None]] = {}

    def take(self, message: Mapping[str, Any]) -> None:
        """Take one message; a unit runs in a task of its own."""
        if "unit" in message:
            number = message["number"]
            unit = Unit.from_dict(message["unit"], self._contexts[message["unit"]["context"]])
            task = asyncio.create_task(self._run(number, message["work"], unit))
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number, None))
        elif "work" in message:
            spec = WorkSpec.from_dict(message["work"])
            self._specs[message["digest"]] = spec
        elif "context" in message:
            self._contexts[message["hash"]] = Context.from_dict(message["context"])
        elif "forget" in message:
            self._contexts.pop(message["forget"], None)
        elif message["cancel"] in self._running:
            self._running[message["cancel"]].cancel()

    async def _run(self, number: int, work: str, unit: Unit) -> None:
        try:
            with boundary(ExecutorError, f"a worker's own fault on task {unit.task.task_id!r}"):
                async with aclosing(self._executor(work).submit(unit)) as finished:
                    async for rollout in finished:
                        self._send({"number": number, "rollout": rollout.to_dict()})
            self._send({"number": number, "end": True})
        except TfgrpoError as exc:
            self._send({"number": number, "error": error_to_dict(exc)})

    def _executor(self, work: str) -> LocalExecutor:
        if work not in self._built:
            self._built[work] = self._build(self._specs[work])
        return self._built[work]

    def _build(self, spec: WorkSpec) -> LocalExecutor:
        for folder in spec.folders:
            add_module_folder(Path(folder))
        lms = {n: RemoteLM(self._client, n, facts) for n, facts in spec.lms.items()}
        policy, verifier = load_object(spec.builder, "a worker's builder")(
            spec.values, lms.__getitem__
        )
        verifier_id = "" if verifier is None else verifier.verifier_id
        if (policy.policy_id, verifier_id) != (spec.policy_id, spec.verifier_id):
            raise ConfigError(
                f"a worker's policy is {policy.policy_id!r} and its verifier {verifier_id!r}, the "
                f"run's are {spec.policy_id!r} and {spec.verifier_id!r}: install the same code and "
                "versions on every worker"
            )
        return LocalExecutor(policy, verifier, spec.settings)
