"""F29: the terminal is closed while a run goes on, as when a remote connection drops."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import termios
import time
from pathlib import Path

import pytest

from tests.cli.command_line import command, environment, folder_with
from tests.cli.test_provider import arguments, digit, learn, paid_twice
from tests.patience import PATIENCE_S
from tfgrpo.testing import Answer, Call, FaultServer, say


def alive(group: int) -> bool:
    """Tell whether any process of a process group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.real
def test_f29_a_closed_terminal_keeps_what_was_paid_and_leaves_no_process(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)

    def script(call: Call) -> Answer:
        return say(digit(call)).after(0.1 if call.index < 60 else 0.0)

    with FaultServer(script) as server:
        master, slave = pty.openpty()
        process = subprocess.Popen(
            command(*arguments(folder, server)),
            cwd=folder,
            env=environment(folder),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        until = time.monotonic() + 60
        while server.call_count < 16:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        os.close(master)  # the kernel sends SIGHUP, and every write to the terminal fails
        assert process.wait(timeout=PATIENCE_S) == 130
        assert not alive(process.pid)
        asked = server.call_count
        assert asked <= 16 + 2 * 4
        after = learn(folder, server, "--json")
        assert after.code in (0, 1), after
        assert not paid_twice(server) and server.call_count > asked
