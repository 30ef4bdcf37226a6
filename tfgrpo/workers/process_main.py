"""A worker process: `python -m tfgrpo.workers.process_main FD`, started by `workers.processes`.

It speaks over an inherited socket and ends with its parent. Nothing of it reaches the parent's
standard output. Does not know who started it or what units are for. Source: own.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from typing import Any

from tfgrpo.runtime.redaction import RedactingFilter
from tfgrpo.workers.frames import Frames
from tfgrpo.workers.work import software
from tfgrpo.workers.workbench import Workbench

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def _die_with(parent: int) -> None:
    """End when the parent does, however it ends (Linux; elsewhere the closed socket says it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before
            os._exit(1)


async def _work(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    bench: Workbench | None = None

    def take(message: dict[str, Any]) -> None:
        nonlocal bench
        if "hello" in message:
            hello = message["hello"]
            bench = Workbench(lambda row: frames.send([row]), hello["endpoint"], hello["token"])
            frames.send([{"ready": software()}])
        elif bench is not None:
            bench.take(message)

    frames = Frames(take, gone.set)
    await loop.create_unix_connection(lambda: frames, sock=connection)
    await gone.wait()
    os._exit(0)  # nobody is there to hear of anything that still runs


def main(descriptor: int, parent: int) -> None:
    """Work until the parent is gone."""
    _die_with(parent)
    os.set_inheritable(descriptor, False)  # what a verifier starts has nothing to do with it
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"worker {os.getpid()} %(levelname)s %(message)s"))
    handler.addFilter(RedactingFilter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    sys.stdout = sys.stderr  # the parent's output holds records
    asyncio.run(_work(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
