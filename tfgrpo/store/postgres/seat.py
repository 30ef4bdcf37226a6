"""A writer's seat at a run: its session, its lease, and who has lost theirs.

A session is the unit of everything that a writer holds: draws it asks for, groups it makes, money
it has drawn, and the right to decide. It is closed by itself or, once its lease is over, by any
other writer; a closed one can write what was paid for and nothing else (`tfgrpo.hold` raises). So
a writer that was frozen or cut off finds out before it can do harm. A writer whose process is seen
to be gone, on the same machine, is closed at once.

Only the server's clock counts. Does not know calls or money. Source: own; leases with fencing.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tfgrpo.errors import StoreError

__all__ = ["Role", "Seat", "Terms", "reap"]

Role = Literal["learner", "writer"]
"""A run has one learner, which decides, and any number of writers beside it."""

_HERE: set[str] = set()
"""Seats of this process that are taken, by their token."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How long things are waited for, seconds."""

    lease_s: float = 60.0
    """A writer that was not heard of for so long loses its seat."""
    call_s: float = 630.0
    """A call is not sent again by another while it may still be under way: its longest time and
    half a minute."""
    beat_s: float = 5.0
    """Between two signs of life of a writer that has nothing to write."""
    send_within_s: float = 4.0
    """A call whose intent is older is not sent: the writer was frozen, and may have lost it."""


@cache
def _machine() -> str:
    """Return what two processes share that can see each other's pid; empty where it is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(pid: int) -> str:
    """Return when a process was started; empty where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def _is_gone(pid: int, machine: str, born: str) -> bool:
    """Tell whether a writer is surely gone; False where it cannot be seen from here."""
    if not machine or machine != _machine() or sys.platform != "linux":
        return False
    started, _, token = born.partition(":")
    if pid == os.getpid() and started == _born(pid):
        return token not in _HERE
    return _born(pid) != started


class Seat:
    """One writer's place at a run; `take` it before anything is written.

    Args:
        name: the run's name, for messages.
        role: a learner is refused while another one lives.
        terms: of the lease.
    """

    def __init__(self, name: str, role: Role, terms: Terms) -> None:
        self.name = name
        self.role: Role = role
        self.terms = terms
        self.session = 0
        self.earlier: list[int] = []
        """Sessions of this writer that others have closed."""
        self.lost: StoreError | None = None
        """Why this writer may no longer decide or send; None while it may."""
        self._token = uuid.uuid4().hex
        self._batch = 0

    def next_batch(self) -> int:
        """Return the number of the next transaction."""
        self._batch += 1
        return self._batch

    def take(self, connection: Any) -> int:
        """Take a new session, in the caller's transaction, and return its number.

        Raises:
            StoreError: another learner is at work; the message names pid and host.
        """
        connection.execute("SELECT FROM tfgrpo.runs WHERE run = tfgrpo.run() FOR UPDATE")
        _HERE.add(self._token)
        born = f"{_born(os.getpid())}:{self._token}"
        mine = connection.execute(
            "SELECT session FROM tfgrpo.writers"
            " WHERE run = tfgrpo.run() AND born = %s AND closed_at IS NULL",
            (born,),
        ).fetchone()
        if mine is not None:  # taken by an attempt whose answer was lost
            self.session = int(mine[0])
            return self.session
        reap(connection, self.terms)
        if self.role == "learner":
            self._refuse_a_second(connection)
        self.session = int(
            connection.execute(
                "INSERT INTO tfgrpo.writers (session, role, host, pid, machine, born, lease_until)"
                " SELECT 1 + greatest("
                "   (SELECT coalesce(max(session), 0) FROM tfgrpo.writers"
                "     WHERE run = tfgrpo.run()),"
                "   (SELECT coalesce(max(session), 0) FROM tfgrpo.sessions"
                "     WHERE run = tfgrpo.run())),"
                "  %s, %s, %s, %s, %s, clock_timestamp() + %s * interval '1 second'"
                " RETURNING session",
                (
                    self.role,
                    socket.gethostname(),
                    os.getpid(),
                    _machine(),
                    born,
                    self.terms.lease_s,
                ),
            ).fetchone()[0]
        )
        return self.session

    def _refuse_a_second(self, connection: Any) -> None:
        row = connection.execute(
            "SELECT pid, host, to_char(since, 'YYYY-MM-DD\"T\"HH24:MI:SSOF'),"
            " extract(epoch FROM lease_until - clock_timestamp())"
            " FROM tfgrpo.writers"
            " WHERE run = tfgrpo.run() AND role = 'learner' AND closed_at IS NULL"
        ).fetchone()
        if row is None:
            return
        pid, host, since, left_s = row
        here = host == socket.gethostname() and pid == os.getpid()
        raise StoreError(
            f"run {self.name!r} is in use by {'this process' if here else f'process {pid}'} "
            f"(pid {pid} on host {host}, since {since}): wait for it, stop it, or choose another "
            f"run folder. If it is gone, its lease ends in {max(0.0, float(left_s)):.0f} s"
        )

    def take_again(self, connection: Any) -> None:
        """Take a new session after others have closed the old one, in the caller's transaction.

        A learner whose place another learner has taken goes on as a writer, for what was paid for,
        and knows that it is `lost`.
        """
        if self.session not in self.earlier:
            self.earlier.append(self.session)
        try:
            self.take(connection)
        except StoreError as exc:
            self.lost = exc
            self.role = "writer"
            self.take(connection)

    def leave(self) -> None:
        """Count as gone from now on."""
        _HERE.discard(self._token)


def reap(connection: Any, terms: Terms) -> int:
    """Close the sessions of writers that are gone, in the caller's transaction or one by one.

    A server that was just started gives everybody the time of a lease to come back.

    Returns:
        How many were closed.
    """
    rows = connection.execute(
        "SELECT session, pid, machine, born, closed_at IS NOT NULL,"
        " lease_until < clock_timestamp()"
        "  AND pg_postmaster_start_time() + %s * interval '1 second' < clock_timestamp()"
        " FROM tfgrpo.writers WHERE run = tfgrpo.run() AND NOT is_dead ORDER BY session",
        (terms.lease_s,),
    ).fetchall()
    closed = 0
    for session, pid, machine, born, is_closed, is_over in rows:
        if _is_gone(int(pid), machine, born):
            if is_closed:  # it was cut off then, and is gone now: nothing of it is under way
                connection.execute(
                    "UPDATE tfgrpo.writers SET is_dead = true"
                    " WHERE run = tfgrpo.run() AND session = %s",
                    (session,),
                )
                continue
            how = (session, False, True)
        elif is_over and not is_closed:
            how = (session, True, False)
        else:
            continue
        row = connection.execute("SELECT tfgrpo.close_session(%s, %s, %s)", how).fetchone()
        closed += bool(row[0])
    return closed
