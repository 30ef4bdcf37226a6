"""What runs inside a cell: candidate code, or a task's tests, never both in one process.

Started as `python -I -c SOURCE`, so it imports only the standard library. It talks to its parent
by one JSON line at a time over what were its standard input and output; the code it runs sees an
empty input, and its output goes to standard error, which the parent reads as text.

A cell with candidate code answers calls by value and knows neither tests nor expected results; it
can end, hang or lie about its own return values, and nothing else. A cell with tests runs the
task author's code, in which the candidate's functions are stand-ins that ask the parent.

Does not know rewards. Source: own.
"""

import ast
import builtins
import contextlib
import ctypes
import functools
import json
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

_PLAIN = (str, bool, int, type(None))
_TAGS: dict[type, str] = {tuple: "t", set: "s", frozenset: "z"}
_DEPTH = 40


def encode(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON with tags; raises TypeError for what has no such form."""
    if depth > _DEPTH:
        raise TypeError("nested more than 40 deep")
    kind = type(value)
    if kind is int and abs(value) >> 64:
        return {"i": hex(value)}  # decimal digits of long integers are limited, and slow
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if value - value == 0.0 else {"f": repr(value)}
    if kind is complex:
        return {"c": [encode(value.real), encode(value.imag)]}
    if kind is list:
        return [encode(v, depth + 1) for v in value]
    if kind is bytes:
        return {"b": value.hex()}
    if kind in _TAGS:
        return {_TAGS[kind]: [encode(v, depth + 1) for v in value]}
    if isinstance(value, dict):
        pairs = [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in dict.items(value)]
        return {"d": pairs}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return encode(value.item(), depth + 1)
    raise TypeError("a value of type " + kind.__name__ + " cannot be handed over")


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    (tag, inner), *rest = value.items()
    if rest:
        raise ValueError("not an encoded value")
    if tag == "d":
        return {decode(k): decode(v) for k, v in inner}
    if tag == "b":
        return bytes.fromhex(inner)
    if tag == "c":
        return complex(decode(inner[0]), decode(inner[1]))
    if tag == "f":
        return float(inner)
    if tag == "i":
        return int(inner, 16)
    made: Any = {tag: kind for kind, tag in _TAGS.items()}[tag]
    return made([decode(v) for v in inner])


def describe(exc: BaseException) -> str:
    """Return an exception as one short line, whatever its own text method does."""
    try:
        text = str(exc)
    except BaseException as broken:  # the candidate's own class may do anything here
        text = "unprintable (" + type(broken).__name__ + ")"
    return (type(exc).__name__ + ": " + text)[:300]


def limit(request: dict[str, Any]) -> None:
    """Lower this process's limits and rights for good; called before any foreign code is seen."""
    jail: dict[str, Any] = {"__name__": "jail"}
    exec(compile(request["jail"], "cell_jail.py", "exec"), jail)
    held = jail["confine"](request["readable"], os.getcwd())
    limits = request["limits"]
    for name in ("CPU", "AS", "FSIZE", "NOFILE", "NPROC", "CORE"):
        if name in limits and not (name == "NPROC" and held["calls"]):
            kind = getattr(resource, "RLIMIT_" + name)
            _, hard = resource.getrlimit(kind)
            most = limits[name] if hard == resource.RLIM_INFINITY else min(limits[name], hard)
            resource.setrlimit(kind, (most, most))
    with contextlib.suppress(OSError, AttributeError):
        # Not dumpable: another process of the same user cannot read or trace this one.
        # The parent's end is this one's end.
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(4, 0, 0, 0, 0)
        prctl(1, 9, 0, 0, 0)
    # As at a prompt: `exit` and `quit` are there, and long integers have a text.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.set_int_max_str_digits(0)


def module(name: str) -> dict[str, Any]:
    """Return the names of a fresh module that `sys.modules` knows, as a file of its own has."""
    made = types.ModuleType(name)
    made.__file__ = "candidate.py"
    sys.modules[name] = made
    return made.__dict__


class Line:
    """The line to the parent."""

    def __init__(self) -> None:
        self._in = os.fdopen(os.dup(0), "rb")
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)

    def give_up(self) -> None:
        """Make the reply side the standard output: from here on its bytes are the program's."""
        os.dup2(self._out.fileno(), 1)
        self._out.close()
        self._in.close()

    def read(self) -> Any:
        """Return the next request, or None at the end."""
        line = self._in.readline()
        return json.loads(line) if line else None

    def write(self, reply: Any) -> None:
        """Send one reply, whole."""
        data = memoryview(json.dumps(reply).encode() + b"\n")
        while data:
            data = data[self._out.write(data) :]


_PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
"""What a class `Solution` may use without importing it, as on LeetCode."""


def load(names: dict[str, Any], code: str) -> list[str]:
    """Run candidate code; return which functions it defines, methods of `Solution` included."""
    if "class Solution" in code:
        given: dict[str, Any] = {}
        exec(_PRELUDE, given)
        names["__builtins__"] = {**given, **vars(builtins)}
    # A script's last lines may end it or ask for input; what it defined before that is there.
    with contextlib.suppress(SystemExit, EOFError):
        exec(compile(code, "candidate.py", "exec"), names)
    solution = names.get("Solution")
    methods = dir(solution) if isinstance(solution, type) else ()
    found = {k for k, v in names.items() if callable(v)} | set(methods)
    return sorted(k for k in found if not k.startswith("_"))


def function_of(names: dict[str, Any], name: str) -> Any:
    """Return the function asked for: the module's, or a method of a new `Solution`."""
    if not callable(names.get(name)) and isinstance(names.get("Solution"), type):
        return getattr(names["Solution"](), name, None)
    return names.get(name)


def call(names: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Call one function of the candidate's."""
    function = function_of(names, request["call"])
    if not callable(function):
        return {"raised": "NameError: there is no function " + repr(request["call"])}
    args, kwargs = decode(request["args"]), decode(request["kwargs"])
    return {"value": encode(function(*args, **kwargs))}


def program(line: Line, request: dict[str, Any]) -> None:
    """Run a whole program as a script: real standard input and output, and its own exit code."""
    data = request["stdin"].encode("utf-8", "replace")
    with open("stdin", "w+b") as given:
        os.unlink("stdin")
        given.write(data)
        given.seek(0)
        os.dup2(given.fileno(), 0)
    line.give_up()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives on
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.argv = ["candidate.py"]
    exec(compile(request["program"], "candidate.py", "exec"), module("__main__"))


class CandidateError(Exception):
    """The candidate's function raised something."""


class CandidateGone(BaseException):
    """The candidate ended its process or was late; no test's `except Exception` sees that."""


_RAISED = (
    ArithmeticError, AttributeError, IndexError, KeyError, LookupError, NameError,
    NotImplementedError, OverflowError, RuntimeError, StopIteration, TypeError, ValueError,
    ZeroDivisionError,
)  # fmt: skip


def stand_in(line: Line, name: str) -> Callable[..., Any]:
    """Return a function that asks the parent to call the candidate's."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        line.write({"call": name, "args": encode(args), "kwargs": encode(kwargs)})
        reply = line.read()
        if reply is None or "gone" in reply:
            raise CandidateGone((reply or {}).get("gone", "no reply"))
        if "value" not in reply:
            # Tests may expect an exception of a certain kind.
            kinds = {k.__name__: k for k in _RAISED}
            raise kinds.get(reply["raised"].split(":")[0], CandidateError)(reply["raised"])
        return decode(reply["value"])

    asked.__name__ = name
    return asked


def tests(line: Line, request: dict[str, Any]) -> dict[str, Any]:
    """Run a task's tests; return [[name, why it failed or ""]]."""
    names = module("tests")
    names.update({n: stand_in(line, n) for n in request["names"]})
    results: list[list[str]] = []

    def run(name: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except (Exception, CandidateGone) as exc:
            results.append([name, describe(exc)])
        else:
            results.append([name, ""])

    tree = ast.parse(request["tests"])  # noqa: TID251 (runs without the package)
    broken = ""
    for node in tree.body:
        code = compile(ast.Module([node], []), "tests.py", "exec")
        if isinstance(node, ast.Assert):
            run(ast.unparse(node)[:200], functools.partial(exec, code, names))
            continue
        try:
            exec(code, names)
        except (Exception, CandidateGone) as exc:
            broken = broken or describe(exc)
    # Only what the tests themselves define: a candidate's own `test_...` proves nothing.
    defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    for name in dict.fromkeys(defined):
        if name.startswith("test"):
            run(name, names[name])
    entry = request["entry"]
    if entry and "check" in defined:
        run("check", functools.partial(names["check"], names.get(entry) or stand_in(line, entry)))
    if broken:
        results.append(["set-up of the tests", broken])
    return {"results": results}


def serve(line: Line) -> None:
    """Answer requests until the parent hangs up."""
    names = module("candidate")
    while (request := line.read()) is not None:
        if "program" in request:
            return program(line, request)
        try:
            if "load" in request:
                reply: dict[str, Any] = {"names": load(names, request["load"])}
            elif "call" in request:
                reply = call(names, request)
            else:
                reply = tests(line, request)
        except BaseException as exc:  # foreign code: also what leaves by SystemExit is its failure
            reply = {"raised": describe(exc)}
        line.write(reply)


if __name__ == "__main__":
    channel = Line()
    limit(channel.read())
    channel.write({"ready": True})
    serve(channel)
