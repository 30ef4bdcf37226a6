"""Cells: processes of their own for foreign Python code, with limits and a deadline.

`process` limits CPU time, memory, files and processes, gives a new session, an empty environment
and an empty folder, and kills the whole process group at the end; where the kernel can, the code
also gives up files outside, TCP, other processes and uncounted memory (see `cell_jail`). It is
**not** a security boundary: on an older kernel the code sees the files and processes of its user.
`bwrap` adds namespaces: no network, a read-only system, nothing of the user's files.

Started by root, a cell runs as the unprivileged user 65534 where that user can read the
interpreter; where it cannot, process limits do not bind and a warning says so.

Does not know what the code is for. Source: own; bubblewrap for the namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tfgrpo.errors import ConfigError, VerifierError

__all__ = ["Cell", "CellGone", "CellLimits", "Level", "check_level"]

log = logging.getLogger(__name__)

Level = Literal["none", "process", "bwrap"]
_NOBODY = 65534
_MOST_REPLY = 4_000_000
_LOOK_EVERY_S = 0.25
"""How often the size of a cell's folder is looked at while it works."""


@dataclass(frozen=True, slots=True)
class CellLimits:
    """What one cell may take."""

    timeout_s: float = 10.0
    """Wall and CPU time of the whole cell, seconds."""
    memory_mb: int = 512
    """Address space, MiB."""
    file_mb: int = 16
    """Largest file it may write, MiB."""
    output_bytes: int = 65_536
    """How much of its printed output is kept; the rest is read and dropped."""
    packages: bool = False
    """May import installed packages, not only the standard library."""

    def as_rlimits(self) -> dict[str, int]:
        """Return the limits as the runner sets them; no further process, no core file."""
        return {
            "CPU": int(self.timeout_s) + 2,
            "AS": self.memory_mb << 20,
            "FSIZE": self.file_mb << 20,
            "NOFILE": 64,
            "NPROC": 1,
            "CORE": 0,
        }


class CellGone(Exception):
    """The cell ended, was late or sent nonsense: the fault of the code in it. `is_late` tells."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late


class _Ended(CellGone):
    """The cell's process ended by itself."""

    def __init__(self, message: str, code: int | None) -> None:
        super().__init__(message)
        self.code = code


def check_level(level: str) -> None:
    """Raise `ConfigError` where cells of this level cannot be made here."""
    if level not in ("none", "process", "bwrap"):
        raise ConfigError(f"level is {level!r}; allowed are 'none', 'process', 'bwrap'")
    if level != "none" and sys.platform != "linux":
        raise ConfigError(f"level is {level!r}; running code needs Linux, this is {sys.platform}")
    if level == "bwrap" and shutil.which("bwrap") is None:
        raise ConfigError(
            "level is 'bwrap', but there is no program of that name: install bubblewrap "
            "(Debian: apt install bubblewrap)"
        )


@cache
def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


@cache
def _hide_this_process() -> None:
    """Let no other process of this user read or trace this one: cells run as the same user.

    The price: no core files and no debugger that attaches. Not for root, whose cells run as
    another user.
    """
    if os.geteuid() != 0:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


@cache
def _unprivileged_uid() -> int | None:
    """Return the user a cell runs as where we are root, or None where it has to stay ours."""
    if os.geteuid() != 0:
        return None
    for path in (Path(_python()), Path(os.__file__)):
        for part in (path, *path.parents):
            needed = 0o5 if part.is_dir() else 0o4
            if part.stat().st_mode & needed != needed:
                log.warning(
                    "code cells run as root: user %d cannot read %s, so limits on processes do not "
                    "bind and files are not protected; run as an unprivileged user, or use an "
                    "interpreter that others can read",
                    _NOBODY,
                    part,
                )
                return None
    return _NOBODY


def _python() -> str:
    return os.path.realpath(sys.executable)


def _command(level: Level, limits: CellLimits) -> list[str]:
    isolated = ["-I", "-B"] if limits.packages else ["-I", "-S", "-B"]
    python = [
        sys.executable if limits.packages else _python(),
        *isolated,
        "-c",
        _source("cell_runner.py"),
    ]
    if level == "process":
        return python
    binds: list[str] = []
    for path in dict.fromkeys([sys.base_prefix, sys.prefix, str(Path(_python()).parent)]):
        if not path.startswith("/usr/"):
            binds += ["--ro-bind", path, path]
    for name in ("lib", "lib64", "bin"):
        path = f"/{name}"
        if os.path.islink(path):
            binds += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            binds += ["--ro-bind", path, path]
    return [
        *("bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
        *("--uid", str(_NOBODY), "--gid", str(_NOBODY), "--hostname", "cell", "--clearenv"),
        *("--ro-bind", "/usr", "/usr", *binds, "--proc", "/proc", "--dev", "/dev"),
        # Whatever can be written lies in memory: one folder of a fixed size, and nothing else.
        *("--size", str(limits.file_mb << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        "--",
        *python,
    ]


def _readable(limits: CellLimits) -> list[str]:
    """Return what the interpreter needs to read."""
    paths = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"]
    paths += [sys.base_prefix, sys.prefix, str(Path(_python()).parent.parent)]
    if limits.packages:
        paths += [p for p in sys.path if p and os.path.isdir(p)]
    return list(dict.fromkeys(paths))


class Cell:
    """One process with foreign code. Blocking; use it as a context manager in a thread.

    Args:
        level: `process` or `bwrap`.
        limits: what it may take.
        grace_s: further seconds before the deadline, for the cell that waits for another.

    Raises:
        VerifierError: the process could not be started: nobody's code is at fault.
    """

    def __init__(self, level: Level, limits: CellLimits, *, grace_s: float = 0.0) -> None:
        self._limits = limits
        self._buffer = b""
        self.output = b""
        """What the code printed, as far as it is kept."""
        if level == "process":
            _hide_this_process()
        self._folder = tempfile.mkdtemp(prefix="tfgrpo-cell-")
        uid = _unprivileged_uid()
        if uid is not None:
            os.chown(self._folder, uid, uid)
        as_user: dict[str, Any] = (
            {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        )
        try:
            self._process = subprocess.Popen(
                _command(level, limits),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._folder,
                env={},
                start_new_session=True,
                bufsize=0,
                **as_user,
            )
        except OSError as exc:
            _remove(self._folder)
            raise VerifierError(f"a code cell could not be started: {exc}") from exc
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self.deadline = time.monotonic() + 30.0
        try:
            reply = self.ask(
                {
                    "limits": limits.as_rlimits(),
                    "jail": _source("cell_jail.py"),
                    "readable": _readable(limits),
                }
            )
        except CellGone as exc:
            reply = {"raised": str(exc)}
        if "ready" not in reply:
            self.close()
            said = self.output.decode(errors="replace")[-300:]
            raise VerifierError(f"a code cell could not be started: {reply} {said}".strip())
        self.deadline = time.monotonic() + limits.timeout_s + grace_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return the reply; raises `CellGone`."""
        self._exchange(request, lambda: b"\n" in self._buffer)
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise CellGone(f"unreadable result {line[:60]!r}") from exc
        if not isinstance(reply, dict):
            raise CellGone(f"unreadable result {line[:60]!r}")
        return reply

    def run_program(self, code: str, stdin: str) -> str:
        """Run a whole program in this cell, to its end; return what it printed.

        Raises:
            CellGone: it was late, failed, or ended with another exit code than 0.
        """
        try:
            self._exchange({"program": code, "stdin": stdin}, lambda: False)
        except _Ended as end:
            if end.code != 0:
                said = self.output.decode(errors="replace").strip().split("\n")[-1]
                raise CellGone(f"{said[:300]} ({_how(end.code)})".strip()) from None
        return self._buffer.decode("utf-8", "replace")

    def _exchange(self, request: dict[str, Any], is_done: Callable[[], bool]) -> None:
        to_send = memoryview(json.dumps(request).encode() + b"\n")
        with selectors.DefaultSelector() as ready:
            process = self._process
            assert process.stdin and process.stdout and process.stderr
            ready.register(process.stdin, selectors.EVENT_WRITE)
            ready.register(process.stdout, selectors.EVENT_READ)
            ready.register(process.stderr, selectors.EVENT_READ)
            while not is_done():
                left = self.deadline - time.monotonic()
                events = ready.select(min(left, _LOOK_EVERY_S)) if left > 0 else []
                if left <= 0:
                    limit = self._limits.timeout_s
                    raise CellGone(f"no result within {limit:g} s", is_late=True)
                if not events:
                    self._check_folder()
                for key, _ in events:
                    if key.fileobj is process.stdin:
                        to_send = self._send(to_send)
                        if not to_send:
                            ready.unregister(process.stdin)
                    elif not self._receive(key.fd, is_reply=key.fileobj is process.stdout):
                        ready.unregister(key.fileobj)

    def _check_folder(self) -> None:
        """End a cell whose files together pass what they may take."""
        most = 4 * self._limits.file_mb << 20
        if _is_larger(self._folder, most):
            raise CellGone(f"its files take more than {most >> 20} MiB")

    def _send(self, data: memoryview) -> memoryview:
        assert self._process.stdin is not None
        try:
            return data[os.write(self._process.stdin.fileno(), data[:65536]) :]
        except BlockingIOError:
            return data
        except BrokenPipeError:
            return data[len(data) :]  # it has ended: the reading side will say how

    def _receive(self, fd: int, *, is_reply: bool) -> bool:
        """Take in what is there; return whether more may come."""
        data = os.read(fd, 65536)
        if not is_reply:
            self.output += data[: max(0, self._limits.output_bytes - len(self.output))]
            return bool(data)
        if not data:
            code = self._wait()
            raise _Ended(f"the code ended its process ({_how(code)})", code)
        self._buffer += data
        if len(self._buffer) > _MOST_REPLY:
            raise CellGone(f"a result of more than {_MOST_REPLY} bytes")
        return True

    def _wait(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.5)
        return None

    def close(self) -> None:
        """Kill everything in the cell and remove its folder."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        _remove(self._folder)


def _remove(folder: str) -> None:
    """Remove a cell's folder, whatever it left there: folders nested deep, or without rights."""
    try:
        os.rmdir(folder)  # as a rule it is empty
        return
    except OSError:
        pass
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        if not os.path.lexists(folder):
            return
        subprocess.run([*command, "--", folder], **quiet)  # type: ignore[call-overload]
    if os.path.lexists(folder):
        log.warning("the folder %s of a code cell could not be removed; remove it by hand", folder)


def _is_larger(folder: str, most: int) -> bool:
    """Return whether the files of a folder take more than `most` bytes, or are too many to say."""
    total, looked, waiting = 0, 0, [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                looked += 1
                if looked > 10_000:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total > most


def _how(code: int | None) -> str:
    if code is None:
        return "its output was closed"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit {code}"
