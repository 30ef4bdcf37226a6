"""Worker processes on this machine, for verifiers and tools that need the processor.

A child is a fresh interpreter with a socket to its parent. It gets no variable that holds or is
named like a key, and ends with its parent. Does not know units or supervision. Source: own.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tfgrpo.errors import ConfigError, ExecutorError
from tfgrpo.runtime.redaction import redact_known
from tfgrpo.workers.frames import Frames
from tfgrpo.workers.pool import Link, Message, StartLink
from tfgrpo.workers.work import software

__all__ = ["child_environment", "process_starter"]

_START_S = 120.0
_KEY_NAME = re.compile(r"(?i)api_?key|token(?!iz)|secret|passw|credential|private_?key")


def child_environment(
    environment: Mapping[str, str], allowed: Collection[str] = ()
) -> dict[str, str]:
    """Return the variables of a worker: none whose name or value is a key, but those allowed.

    >>> child_environment({"HOME": "/root", "OPENAI_API_KEY": "sk-x", "A_TOKEN": "t"}, ["A_TOKEN"])
    {'HOME': '/root', 'A_TOKEN': 't'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name in allowed or not (_KEY_NAME.search(name) or redact_known(value) != value)
    }


def process_starter(endpoint: str, token: str, allowed: Collection[str] = ()) -> StartLink:
    """Return what starts worker processes.

    Args:
        endpoint: URL of the run's endpoint.
        token: of the run; it travels over the socket alone.
        allowed: variables that workers get though their names speak of a key.
    """
    if sys.platform == "win32":
        raise ConfigError("run.executor 'processes' needs Unix sockets, which Windows lacks here")

    async def start(take: Callable[[Message], None], lost: Callable[[str], None]) -> Link:
        link = ProcessLink(take, lost)
        hello = {"endpoint": endpoint, "token": token}
        await link.start(child_environment(os.environ, allowed), hello)
        return link

    return start


class ProcessLink:
    """One child process; a `Link`."""

    def __init__(self, take: Callable[[Message], None], lost: Callable[[str], None]) -> None:
        self._take, self._lost = take, lost
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._frames = Frames(self._message, lambda: None)
        self._watch: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The worker's process id, in words."""
        return f"worker process {self._process.pid if self._process else '?'}"

    async def start(self, environment: Mapping[str, str], hello: Mapping[str, Any]) -> None:
        """Start the child and wait until it is ready.

        Raises:
            ExecutorError: it ended, or was not ready in time.
        """
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "tfgrpo.workers.process_main",
                str(theirs.fileno()), str(os.getpid()),
                pass_fds=[theirs.fileno()],
                env=dict(environment) | {"PYTHONPATH": _import_path()},
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )  # fmt: skip
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._frames, sock=ours)
        self._watch = loop.create_task(self._bury(self._process))
        self._frames.send([{"hello": dict(hello)}])
        try:
            async with asyncio.timeout(_START_S):
                ready = await self._ready
        except TimeoutError:
            await self.kill()
            raise ExecutorError(f"{self.name} was not ready within {_START_S:.0f} s") from None
        except BaseException:
            await self.kill()
            raise
        if ready["ready"] != software():
            await self.kill()
            raise ExecutorError(f"{self.name} runs {ready['ready']}, the run {software()}")

    def _message(self, message: Message) -> None:
        if "ready" in message:
            if not self._ready.done():
                self._ready.set_result(message)
        else:
            self._take(message)

    async def _bury(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the child's end, which says why it went."""
        code = await process.wait()
        said = f"signal {-code}, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self._ready.done():
            self._lost(said)
        else:
            self._ready.set_exception(ExecutorError(f"{self.name} did not start: {said}"))

    def send(self, messages: list[Message]) -> None:
        """Write them to the child's socket."""
        self._frames.send(messages)

    async def kill(self) -> None:
        """Kill the child and wait for its end."""
        self._frames.close()
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                return  # it has just ended
            await self._process.wait()


def _import_path() -> str:
    """Where this process found the package, for a child that starts in another way."""
    return os.pathsep.join(p for p in sys.path if p)
