"""The error tree and its boundary: what is turned into ours, what passes, what pickles."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle  # noqa: TID251 - what worker processes do
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfgrpo
from tfgrpo.errors import (
    BudgetError,
    ConfigError,
    EditError,
    MissingExtraError,
    PolicyError,
    ProviderError,
    StoreError,
    TfgrpoError,
    VerifierError,
    boundary,
)

WRAPPERS = [ConfigError, EditError, PolicyError, StoreError, VerifierError, MissingExtraError]
FOREIGN = [
    StopIteration("done"),
    StopAsyncIteration("done"),
    RuntimeError("generator raised StopIteration"),
    KeyError("x"),
    TimeoutError(),
    ExceptionGroup("two", [ValueError("a"), TypeError("b")]),
]


def modules_with_errors() -> Iterator[str]:
    """Modules whose text derives a class from one that is named as an error."""
    home = Path(tfgrpo.__file__).parent
    for folder, _, names in os.walk(home, followlinks=True):
        for name in names:
            file = Path(folder, name)
            if name.endswith(".py") and re.search(r"^class \w+\(.*Error", file.read_text(), re.M):
                yield ".".join(("tfgrpo", *file.relative_to(home).with_suffix("").parts))


def every_error_class() -> list[type[TfgrpoError]]:
    for module in modules_with_errors():
        importlib.import_module(module)
    found: list[type[TfgrpoError]] = []
    waiting = [TfgrpoError]
    while waiting:
        cls = waiting.pop()
        found.append(cls)
        waiting.extend(cls.__subclasses__())
    return [cls for cls in found if cls.__module__.startswith(tfgrpo.__name__)]


@pytest.mark.parametrize("error", WRAPPERS)
@pytest.mark.parametrize("raised", FOREIGN, ids=lambda e: type(e).__name__)
def test_any_foreign_exception_becomes_ours_with_its_cause(
    error: type[TfgrpoError], raised: Exception
) -> None:
    with pytest.raises(error) as caught, boundary(error, "tool 'mine'"):
        raise raised
    assert caught.value.__cause__ is raised
    assert str(caught.value).startswith(f"tool 'mine': {type(raised).__name__}")


def test_an_exhausted_next_inside_a_boundary_does_not_end_a_generator_around_it() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        with boundary(PolicyError, "policy 'mine'"):
            yield next(iter(()))

    with pytest.raises(PolicyError, match="StopIteration"):
        list(numbers())


async def test_an_exhausted_next_inside_a_coroutine_is_named() -> None:
    async def attempt() -> None:
        with boundary(PolicyError, "policy 'mine'"):
            next(iter(()))

    with pytest.raises(PolicyError, match="policy 'mine': StopIteration"):
        await attempt()


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_what_is_no_failure_passes_as_itself(raised: BaseException) -> None:
    with pytest.raises(type(raised)) as caught, boundary(PolicyError, "policy"):
        raise raised
    assert caught.value is raised


def test_closing_a_generator_inside_a_boundary_is_silent() -> None:
    closed: list[bool] = []

    def steps() -> Iterator[int]:
        try:
            with boundary(PolicyError, "policy"):
                yield 1
        finally:
            closed.append(True)

    running = steps()
    assert next(running) == 1
    running.close()  # type: ignore[attr-defined]
    assert closed == [True]


async def test_cancellation_passes_through_a_boundary() -> None:
    async def work() -> None:
        with boundary(PolicyError, "policy"):
            await asyncio.sleep(60)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_innermost_boundary_names_the_place() -> None:
    with (
        pytest.raises(VerifierError, match=r"^verifier: ValueError: x$"),
        boundary(PolicyError, "policy"),
        boundary(VerifierError, "verifier"),
    ):
        raise ValueError("x")


def test_nothing_happens_where_nothing_is_raised() -> None:
    with boundary(PolicyError, "policy"):
        value = 1
    assert value == 1


@pytest.mark.parametrize("cls", every_error_class(), ids=lambda c: c.__name__)
def test_every_error_pickles_with_its_message_and_fields(cls: type[TfgrpoError]) -> None:
    made: TfgrpoError
    if issubclass(cls, ProviderError):
        made = cls("too fast", kind="rate_limit", status=429, retry_after_s=1.5)
    elif issubclass(cls, BudgetError):
        made = cls("spent", resource="calls")
    else:
        made = cls("what, which, why, what to do")
    back = pickle.loads(pickle.dumps(made))  # noqa: S301
    assert type(back) is cls
    assert str(back) == str(made)
    assert vars(back) == vars(made)


def test_each_error_is_also_the_standard_error_it_stands_for() -> None:
    pairs = {
        ConfigError: ValueError,
        EditError: ValueError,
        ProviderError: RuntimeError,
        PolicyError: RuntimeError,
        VerifierError: RuntimeError,
        BudgetError: RuntimeError,
        StoreError: OSError,
        MissingExtraError: ImportError,
    }
    for ours, standard in pairs.items():
        assert issubclass(ours, TfgrpoError)
        assert issubclass(ours, standard)


@pytest.mark.parametrize(
    ("kind", "fatal", "retryable"),
    [
        ("auth", True, False),
        ("not_found", True, False),
        ("quota", True, False),
        ("rate_limit", False, True),
        ("overloaded", False, True),
        ("timeout", False, True),
        ("connection", False, True),
        ("bad_reply", False, True),
        ("context_too_long", False, False),
        ("bad_request", False, False),
        ("refused", False, False),
    ],
)
def test_a_provider_error_says_whether_to_stop_or_to_try_again(
    kind: str, fatal: bool, retryable: bool
) -> None:
    error = ProviderError("x", kind=kind)  # type: ignore[arg-type]
    assert (error.is_fatal, error.is_retryable) == (fatal, retryable)
