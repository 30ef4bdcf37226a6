"""One connection to a PostgreSQL server, opened again when it breaks.

The server may be restarted or fail over under a run: whoever uses a link tries again for
`PATIENCE_S`, with pauses that grow. What may be repeated is the caller's business: `Link.retry`
repeats only what leaves no trace or the same one.

Off this machine the connection is encrypted and the server's name checked, unless the address or
the environment says otherwise. Does not know tables. Source: psycopg's and libpq's documentation;
own.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from tfgrpo.errors import ConfigError, MissingExtraError, StoreError
from tfgrpo.runtime.redaction import register
from tfgrpo.store.postgres.address import Address

__all__ = ["FENCED", "PATIENCE_S", "Link", "explain", "is_bad_row", "is_lost", "psycopg"]

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 300.0
"""How long a server may be away before a run ends."""
FENCED = "TF001"
"""SQLSTATE of a writer whose session others have closed."""
_OLDEST_SERVER = 140000
_COMING_UP = ("is starting up", "not yet accepting connections", "in recovery mode")
_PAUSES_S = (0.05, 2.0)
_CONNECT_TIMEOUT_S = 10
_SETTINGS = {
    "connect_timeout": str(_CONNECT_TIMEOUT_S),
    "keepalives_idle": "20",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "40000",
    "application_name": "tfgrpo",
}
_REPEATABLE = frozenset({"40001", "40P01"})
"""Serialisation failure, deadlock: nothing was written, the same again may work."""


@cache
def psycopg() -> Any:
    """Return the driver's module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import psycopg as module
    except ImportError as exc:
        raise MissingExtraError.of("postgres", "a journal on a server", "psycopg") from exc
    # what it says of a connection that broke is told by whoever tries again
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    return module


def is_lost(exc: BaseException, connection: Any) -> bool:
    """Tell whether an error means that the connection is gone (and the server may come back)."""
    driver = psycopg()
    if isinstance(exc, driver.OperationalError):
        state = exc.sqlstate or ""
        return bool(connection is None or connection.closed or state.startswith(("08", "57P")))
    is_closed = connection is None or connection.closed
    return isinstance(exc, driver.InterfaceError) and bool(is_closed)


def is_bad_row(exc: BaseException) -> bool:
    """Tell whether an error is the row's own fault: a number out of range, a text that no column
    holds, a repeated number."""
    driver = psycopg()
    state = getattr(exc, "sqlstate", None) or ""
    if isinstance(exc, driver.ProgrammingError):
        return not state  # the driver has no form for it; the server's own would be our mistake
    is_its_own = isinstance(exc, (driver.DataError, driver.IntegrityError)) or state[:2] == "54"
    return is_its_own or isinstance(exc, (OverflowError, TypeError, ValueError))


def explain(address: Address, doing: str, exc: BaseException) -> StoreError:
    """Return the one clear line for a driver's error, without secrets."""
    what = f"cannot {doing} {str(address)!r}"
    state = getattr(exc, "sqlstate", None) or ""
    said = address.clean(" ".join(str(exc).split()))
    if state in ("53100", "53200"):
        return StoreError(
            f"{what}: the server has no room left ({said}). What was committed is safe: free some "
            "and run again"
        )
    if state == "25006":
        return StoreError(f"{what}: the server is read-only, such as a replica: use its primary")
    if state == "42501":
        return StoreError(f"{what}: this user may not ({said}): use another, or grant it")
    if state.startswith("28") or "password" in said:
        return StoreError(
            f"{what}: {said}. Give the password in PGPASSWORD or a passfile, and check user and "
            "database"
        )
    if state == "3D000" or ("database" in said and "does not exist" in said):
        return StoreError(f"{what}: {said}: make the database first (createdb)")
    return StoreError(f"{what}: {type(exc).__name__}: {said}")


class Link:
    """A connection in autocommit; not safe to use from two threads at once.

    Args:
        address: of the database.
        run: number of the run whose rows it sees; 0 sees none.
        readonly: refuse every write.
        durable: what is committed survives the server's loss of power, too.
        patience_s: how long to try again.
    """

    def __init__(
        self,
        address: Address,
        run: int = 0,
        *,
        readonly: bool = False,
        durable: bool = True,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.address = address
        self.run = run
        self.patience_s = patience_s
        self._readonly = readonly
        self._durable = durable
        self._connection: Any = None
        self._latest = math.inf
        """Monotonic time after which nothing is tried again."""

    @property
    def connection(self) -> Any:
        """The open connection; a new one where the last one broke.

        Raises:
            psycopg.OperationalError: the server cannot be reached.
            ConfigError: libpq cannot read the address.
        """
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Any:
        driver = psycopg()
        try:
            given = driver.conninfo.conninfo_to_dict(self.address.url)
        except driver.ProgrammingError as exc:
            raise ConfigError(
                f"{str(self.address)!r} cannot be read: {self.address.clean(str(exc))}"
            ) from None
        register(os.environ.get("PGPASSWORD", ""))
        made = driver.connect(
            **{**_SETTINGS, **_encryption(given), **given}, autocommit=True, prepare_threshold=3
        )
        made.adapters.register_loader("numeric", _number_loader())
        try:
            if made.info.server_version < _OLDEST_SERVER:
                raise StoreError(
                    f"{str(self.address)!r} is PostgreSQL {made.info.server_version // 10000}: "
                    "at least 14 is needed"
                )
            made.execute(
                "SELECT set_config('search_path', 'tfgrpo_run, pg_catalog', false),"
                " set_config('tfgrpo.run', %s, false),"
                " set_config('synchronous_commit', %s, false),"
                " set_config('default_transaction_read_only', %s, false),"
                " set_config('client_min_messages', 'warning', false)",
                (
                    str(self.run or ""),
                    "on" if self._durable else "off",
                    "on" if self._readonly else "off",
                ),
            )
        except BaseException:
            made.close()
            raise
        return made

    def see(self, run: int) -> None:
        """See the rows of this run from now on."""
        self.run = run
        sql = "SELECT set_config('tfgrpo.run', %s, false)"
        self.retry("open", lambda connection: connection.execute(sql, (str(run),)))

    def retry(self, doing: str, work: Callable[[Any], T]) -> T:
        """Do work with the connection; again where that broke, for work that may be repeated.

        Raises:
            StoreError: the server was away for too long, or refuses.
        """
        pause = self.pause()
        while True:
            try:
                return work(self.connection)
            except (StoreError, ConfigError):
                raise
            except Exception as exc:
                if self.may_repeat(exc) and pause.wait(exc):
                    continue
                raise explain(self.address, doing, exc) from exc

    def may_repeat(self, exc: BaseException) -> bool:
        """Tell whether the same work may succeed later: the connection is gone, or two
        transactions stood in each other's way."""
        state = getattr(exc, "sqlstate", None) or ""
        return state in _REPEATABLE or (is_lost(exc, self._connection) and not _is_refusal(exc))

    def pause(self) -> Pause:
        """Return pauses between attempts, for as long as this link has patience."""
        return Pause(self, self.patience_s)

    def left_s(self) -> float:
        """Seconds for which anything may be tried again."""
        return self._latest - time.monotonic()

    def stop(self, in_s: float = 0.0) -> None:
        """Try nothing again from now on, or after some seconds, as somebody who leaves; safe from
        any thread."""
        self._latest = min(self._latest, time.monotonic() + in_s)

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self.stop()
        if self._connection is not None:
            self._connection.close()


class Pause:
    """Growing pauses with jitter, up to a total; a server that says it is coming up gets the
    longest, whatever the total."""

    def __init__(self, link: Link, total_s: float) -> None:
        self._link = link
        self._began = time.monotonic()
        self._until = self._began + total_s
        self._next_s = _PAUSES_S[0]
        self._has_told = False

    def wait(self, exc: BaseException) -> bool:
        """Sleep; False where the time is over."""
        address = self._link.address
        if any(words in str(exc) for words in _COMING_UP):
            self._until = max(self._until, self._began + PATIENCE_S)
        left = min(self._until - time.monotonic(), self._link.left_s())
        if left <= 0:
            return False
        if not self._has_told:
            self._has_told = True
            log.warning(
                "%s: the connection is lost (%s); trying again for %.0f s",
                address,
                address.clean(" ".join(str(exc).split()))[:200],
                left,
            )
        time.sleep(min(left, self._next_s * random.uniform(0.5, 1.0)))
        self._next_s = min(_PAUSES_S[1], 2 * self._next_s)
        return True


@cache
def _number_loader() -> Any:
    """Return a loader that gives whole numbers as `int` and others as `float`, as SQLite does."""

    class NumberLoader(psycopg().adapt.Loader):  # type: ignore[misc]
        def load(self, data: Any) -> int | float:
            text = bytes(data).decode("ascii")
            return int(text) if text.lstrip("-").isdigit() else float(text)

    return NumberLoader


def _is_refusal(exc: BaseException) -> bool:
    """True where trying again gives the same: a wrong password, an unknown database or role."""
    state = getattr(exc, "sqlstate", None) or ""
    said = str(exc)
    return state.startswith(("28", "3D")) or (
        not state
        and any(
            words in said
            for words in (
                "password authentication failed",
                "no password supplied",
                "does not exist",
                "no pg_hba.conf entry",
                "certificate",
                "SSL",
                "could not translate host name",
            )
        )
    )


def _encryption(given: dict[str, Any]) -> dict[str, str]:
    """Encrypt and check the server's name wherever the connection leaves this machine."""
    hosts = [str(given.get(name) or "") for name in ("host", "hostaddr")]
    hosts = [h for hosts in hosts if hosts for h in hosts.split(",")]
    hosts = hosts or [os.environ.get("PGHOST", "")]
    is_here = all(
        not h or h.startswith(("/", "@", "127.")) or h in ("localhost", "::1") for h in hosts
    )
    if is_here or "sslmode" in given or os.environ.get("PGSSLMODE"):
        return {}
    settings = {"sslmode": "verify-full"}
    if "sslrootcert" not in given and not os.environ.get("PGSSLROOTCERT"):
        settings["sslrootcert"] = "system"
    return settings
