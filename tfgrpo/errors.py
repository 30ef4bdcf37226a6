"""The error tree, and the one place where foreign exceptions become ours.

    TfgrpoError
    ├── ConfigError         (ValueError)    a setting, a task file or a call argument is wrong
    ├── ProviderError       (RuntimeError)  one LM call failed; `kind` says how
    ├── PolicyError         (RuntimeError)  a policy or one of its tools raised
    ├── VerifierError       (RuntimeError)  a verifier raised, timed out or returned no score
    ├── EditError           (ValueError)    an edit of the library cannot be applied
    ├── BudgetError         (RuntimeError)  a reservation would pass a limit
    ├── ExecutorError       (RuntimeError)  workers cannot be used, or were lost too often
    │   └── UnitLost                        one worker was lost with what it was doing
    ├── StoreError          (OSError)       run folder: disk, lock, version, damage
    └── MissingExtraError   (ImportError)   an optional library is not installed

Four rules. A message names what failed, the value given, what is allowed and what to do.
A rollout never raises: its failure is an `outcome`. Foreign exceptions are caught by `boundary`
alone.
Every error pickles, so worker processes can hand it over.

Does not know: exit codes (the command line maps classes to codes), logging, retries.
Idea: classify at the boundary, keep the cause (own).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal

ProviderFailure = Literal[
    "auth",
    "not_found",
    "quota",
    "rate_limit",
    "overloaded",
    "timeout",
    "connection",
    "context_too_long",
    "bad_request",
    "refused",
    "bad_reply",
]
"""How a call failed. `auth`, `not_found` and `quota` are fatal for the run; `rate_limit`,
`overloaded`, `timeout`, `connection` and `bad_reply` may be tried again; the rest belong to
the request and are never sent again unchanged."""

_FATAL = frozenset({"auth", "not_found", "quota"})
_RETRYABLE = frozenset({"rate_limit", "overloaded", "timeout", "connection", "bad_reply"})


class TfgrpoError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(TfgrpoError, ValueError):
    """A user's setting, file or argument is wrong; nothing has been spent."""


class ChangedSettingsError(ConfigError):
    """A run is opened with other settings than it was made with."""


class ProviderError(TfgrpoError, RuntimeError):
    """One call to an LM failed.

    `retry_after_s` is the server's own hint in seconds, if it gave one; `status` the HTTP
    status, if there was one. The other three say what it cost: `was_sent` is False where no byte
    of the request left (None: unknown), `had_output` is True where a reply had begun, `spent` is
    the `tfgrpo.rollout.Usage` that the server reported before it broke off.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: ProviderFailure,
        status: int | None = None,
        retry_after_s: float | None = None,
        was_sent: bool | None = None,
        had_output: bool = False,
        spent: object | None = None,
    ) -> None:
        super().__init__(message)
        self.kind: ProviderFailure = kind
        self.status = status
        self.retry_after_s = retry_after_s
        self.was_sent = was_sent
        self.had_output = had_output
        self.spent = spent

    @property
    def is_fatal(self) -> bool:
        """True when no further call with these settings can succeed."""
        return self.kind in _FATAL

    @property
    def is_retryable(self) -> bool:
        """True when the same call may succeed later."""
        return self.kind in _RETRYABLE

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_provider_error, (type(self), str(self), dict(self.__dict__))


def _rebuild_provider_error(
    cls: type[ProviderError], message: str, state: dict[str, Any]
) -> ProviderError:
    error = cls(message, kind=state["kind"])
    error.__dict__.update(state)
    return error


class PolicyError(TfgrpoError, RuntimeError):
    """A policy, or a tool that it called, raised."""


class VerifierError(TfgrpoError, RuntimeError):
    """A verifier could not say anything about a rollout. Never a reward of 0."""


class EditError(TfgrpoError, ValueError):
    """An edit of an experience library cannot be applied; the message is the reason kept."""


class BudgetError(TfgrpoError, RuntimeError):
    """A reservation would pass a limit of the budget. `resource` names the limit."""

    def __init__(self, message: str, *, resource: str = "") -> None:
        super().__init__(message)
        self.resource = resource

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_budget_error, (type(self), str(self), self.resource))


def _rebuild_budget_error(cls: type[BudgetError], message: str, resource: str) -> BudgetError:
    return cls(message, resource=resource)


class ExecutorError(TfgrpoError, RuntimeError):
    """The place where rollouts run cannot be used: workers that do not start, a cluster that is
    gone, code that differs. Finished work is kept."""


class UnitLost(ExecutorError):
    """A worker was lost with what it was doing; doing it again elsewhere pays nothing twice."""


class StoreError(TfgrpoError, OSError):
    """A run folder cannot be used: disk full, locked, read-only, damaged or too new."""


class MissingExtraError(TfgrpoError, ImportError):
    """A feature needs an optional library.

    >>> str(MissingExtraError.of("rl", "training", "torch"))
    "training needs 'torch', which is not installed: pip install 'tfgrpo[rl]'"
    """

    @classmethod
    def of(cls, extra: str, feature: str, module: str) -> MissingExtraError:
        """Name the feature, the absent module and the command that installs the extra."""
        return cls(
            f"{feature} needs {module!r}, which is not installed: pip install 'tfgrpo[{extra}]'"
        )


class _Boundary:
    """A class and not a generator: `contextlib` lets `StopIteration` through as itself where a
    generator turns it into a `RuntimeError`, which several of our errors are."""

    __slots__ = ("_error", "_where")

    def __init__(self, error: type[TfgrpoError], where: str) -> None:
        self._error = error
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(exc, Exception) and not isinstance(exc, TfgrpoError):
            raise self._error(f"{self._where}: {type(exc).__name__}: {exc}") from exc


def boundary(error: type[TfgrpoError], where: str) -> AbstractContextManager[None, None]:
    """Turn any exception of foreign code into `error`, with `where` and the cause in the message.

    Errors of our own tree pass unchanged, so the innermost boundary names the place.
    `KeyboardInterrupt`, `SystemExit` and task cancellation are not exceptions of this kind and
    pass as well.

    >>> try:
    ...     with boundary(VerifierError, "verifier 'mine'"):
    ...         {}["x"]
    ... except VerifierError as exc:
    ...     print(exc)
    verifier 'mine': KeyError: 'x'
    """
    return _Boundary(error, where)
