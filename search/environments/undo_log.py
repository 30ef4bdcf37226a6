"""An undo log under ordinary dicts and lists: branch a big stateful world for what changed.

`UndoLog(tables)` keeps one live copy of the data. A version is a place in a tree of changes; going
from one to another undoes the changes up to the common ancestor and redoes those on the other
side, so branching costs what was touched and not what exists (the tau-bench airline database:
under a millisecond instead of half a second for a deep copy).

The containers are subclasses of `dict` and `list` that write down the inverse of each change, so
tools written for plain data work unchanged and read at full speed. What is put in is copied in; an
object that is neither a dict, list nor immutable is refused. The order of keys is restored too.

A version's key is the content of the records (the two outer levels: table and key) that differ from
the start, so equal states have equal keys however they were reached, in any process.

Does not know tools or trees. Source: undo logs of databases; their use under agent tools: own.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

from tfgrpo.errors import PolicyError, boundary
from tfgrpo.runtime.canonical import digest
from tfgrpo.search.environments.protocol import Effect, StepResult, finish_outcome
from tfgrpo.search.node import action_name

__all__ = ["UndoLog", "UndoLogEnvironment", "UndoPoint"]

_MISSING = object()
_Change = tuple[Any, Any, Any, Any]
"""(container, key, old, new); key `_MISSING` stands for the whole content."""


_Place = tuple[Any, ...]
"""(table,) or (table, key): a record of the two outer levels."""


class UndoPoint:
    """A state of the journal: its parent and the changes from there."""

    __slots__ = ("changes", "depth", "key", "parent", "touched")

    def __init__(
        self,
        parent: UndoPoint | None,
        changes: list[_Change],
        touched: frozenset[_Place] = frozenset(),
        key: str = "start",
    ) -> None:
        self.parent = parent
        self.changes = changes
        self.touched = touched
        self.key = key
        self.depth: int = 0 if parent is None else parent.depth + 1


class UndoLog:
    """The live data and where it stands.

    >>> journal = UndoLog({"doors": {"red": {"open": False}}})
    >>> start = journal.here
    >>> journal.data["doors"]["red"]["open"] = True
    >>> opened = journal.mark()
    >>> journal.go(start), journal.data["doors"]["red"]["open"]
    (1, False)
    >>> journal.go(opened), journal.data["doors"]["red"]["open"]
    (1, True)
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._pending: list[_Change] = []
        self._touched: set[_Place] = set()
        self._original: dict[_Place, Any] = {}
        self.data: _Dict = _Dict(self, data, ())
        self.here = UndoPoint(None, [])

    def mark(self) -> UndoPoint:
        """Return the present state as a version; without changes it is the one we stand on."""
        if self._pending:
            touched = self.here.touched | self._touched
            self.here = UndoPoint(self.here, self._pending, touched, self._key_of(touched))
            self._pending, self._touched = [], set()
        return self.here

    def _key_of(self, touched: frozenset[_Place]) -> str:
        rows = []
        for place in touched:
            now, was = self._at(place), self._original[place]
            is_missing = (now is _MISSING, was is _MISSING)
            if (any(is_missing) and not all(is_missing)) or (not any(is_missing) and now != was):
                rows.append([[str(p) for p in place], now is _MISSING or _plain_copy(now)])
        rows.sort(key=lambda row: row[0])
        return digest(rows, 24) if rows else "start"

    def _at(self, place: _Place) -> Any:
        value: Any = self.data
        for key in place:
            value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
        return value

    def rollback(self) -> int:
        """Undo what was changed since the last version; return how many changes that was."""
        count = len(self._pending)
        for container, key, old, _ in reversed(self._pending):
            _set(container, key, old)
        self._pending, self._touched = [], set()
        return count

    def go(self, version: UndoPoint) -> int:
        """Stand on another version; return how many changes were undone and redone.

        Changes since the last version that were not marked are undone first.
        """
        moves = self.rollback()
        up, down, forward = self.here, version, []
        while up is not down:
            if up.depth >= down.depth:
                for container, key, old, _ in reversed(up.changes):
                    _set(container, key, old)
                moves += len(up.changes)
                assert up.parent is not None
                up = up.parent
            else:
                forward.append(down)
                assert down.parent is not None
                down = down.parent
        for step in reversed(forward):
            for container, key, _, new in step.changes:
                _set(container, key, new)
            moves += len(step.changes)
        self.here = version
        return moves

    def note(self, container: Any, key: Any, old: Any, new: Any) -> None:
        """Write down one change; called by the containers, before they change."""
        for place in self._places(container, key):
            if place not in self._original:
                # nobody has touched it in any version, so it is still as at the start
                self._original[place] = _plain_copy(self._at(place))
            self._touched.add(place)
        self._pending.append((container, key, old, new))

    def _places(self, container: Any, key: Any) -> list[_Place]:
        home: _Place = container.home
        if len(home) == 2 or not isinstance(container, dict):
            return [home]
        if key is _MISSING:  # everything in a table may have moved
            return [(*home, k) for k in container]
        return [(*home, key)]

    def take(self, value: Any, home: _Place) -> Any:
        """Return a value as the journal can follow it.

        Raises:
            TypeError: an object that could change without the journal's knowing.
        """
        if value is None or isinstance(value, (str, int, float, bool, bytes, frozenset)):
            return value
        if isinstance(value, Mapping):
            return _Dict(self, value, home)
        if isinstance(value, list):
            return _List(self, value, home)
        if isinstance(value, tuple):
            return tuple(self.take(v, home) for v in value)
        raise TypeError(
            f"a journal cannot follow changes of {type(value).__name__}: store dicts, lists and "
            "immutable values, or use DeepcopyEnvironment"
        )


def _set(container: Any, key: Any, value: Any) -> None:
    """Put a container back, past its own recording."""
    if key is _MISSING:
        if isinstance(container, dict):
            dict.clear(container)
            dict.update(container, value)
        else:
            list.__setitem__(container, slice(None), value)
    elif value is _MISSING:
        if isinstance(container, dict):
            dict.__delitem__(container, key)
        else:
            list.pop(container)
    elif isinstance(container, dict):
        dict.__setitem__(container, key, value)
    elif key == len(container):
        list.append(container, value)
    else:
        list.__setitem__(container, key, value)


class _Dict(dict[Any, Any]):
    """A dict that tells its journal what changes."""

    __slots__ = ("home", "journal")

    def __init__(self, journal: UndoLog, content: Mapping[Any, Any], home: _Place) -> None:
        self.journal, self.home = journal, home
        super().__init__({k: journal.take(v, self._home_of(k)) for k, v in content.items()})

    def _home_of(self, key: Any) -> _Place:
        return self.home if len(self.home) == 2 else (*self.home, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        value = self.journal.take(value, self._home_of(key))
        self.journal.note(self, key, self.get(key, _MISSING), value)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        old = self[key]
        if next(reversed(self)) == key:
            self.journal.note(self, key, old, _MISSING)
            super().__delitem__(key)
            return
        self._rewrite({k: v for k, v in self.items() if k != key})

    def _rewrite(self, content: dict[Any, Any]) -> None:
        """Replace everything, so that undoing restores the order of the keys as well."""
        self.journal.note(self, _MISSING, dict(self), content)
        dict.clear(self)
        dict.update(self, content)

    def clear(self) -> None:
        self._rewrite({})

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        if key not in self:
            if default is _MISSING:
                raise KeyError(key)
            return default
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[Any, Any]:
        key = next(reversed(self))
        return key, self.pop(key)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> _Dict:  # type: ignore[override,misc]  # narrower than dict's
        self.update(other)
        return self

    def copy(self) -> dict[Any, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return {k: _plain_copy(v) for k, v in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class _List(list[Any]):
    """A list that tells its journal what changes."""

    __slots__ = ("home", "journal")

    def __init__(self, journal: UndoLog, content: Iterable[Any], home: _Place) -> None:
        self.journal, self.home = journal, home
        super().__init__(journal.take(v, home) for v in content)

    def append(self, value: Any) -> None:
        value = self.journal.take(value, self.home)
        self.journal.note(self, len(self), _MISSING, value)
        super().append(value)

    def __setitem__(self, key: SupportsIndex | slice, value: Any) -> None:
        if isinstance(key, slice):
            content = list(self)
            content[key] = [self.journal.take(v, self.home) for v in value]
            self._rewrite(content)
            return
        index = range(len(self))[key]
        value = self.journal.take(value, self.home)
        self.journal.note(self, index, self[index], value)
        super().__setitem__(index, value)

    def _rewrite(self, content: list[Any]) -> None:
        self.journal.note(self, _MISSING, list(self), content)
        list.__setitem__(self, slice(None), content)

    def _changed(self, change: Callable[[list[Any]], Any]) -> Any:
        """Apply a change to a plain copy and take its result over."""
        content = list(self)
        result = change(content)
        self._rewrite([v if _is_known(v) else self.journal.take(v, self.home) for v in content])
        return result

    def __delitem__(self, key: SupportsIndex | slice) -> None:
        self._changed(lambda c: c.__delitem__(key))

    def extend(self, values: Iterable[Any]) -> None:
        for value in list(values):
            self.append(value)

    def __iadd__(self, values: Iterable[Any]) -> _List:  # type: ignore[override,misc]  # as list's
        self.extend(values)
        return self

    def __imul__(self, count: SupportsIndex) -> _List:
        self._changed(lambda c: c.__imul__(count))
        return self

    def insert(self, index: SupportsIndex, value: Any) -> None:
        self._changed(lambda c: c.insert(index, value))

    def pop(self, index: SupportsIndex = -1) -> Any:
        return self._changed(lambda c: c.pop(index))

    def remove(self, value: Any) -> None:
        self._changed(lambda c: c.remove(value))

    def clear(self) -> None:
        self._rewrite([])

    def sort(self, **options: Any) -> None:
        self._changed(lambda c: c.sort(**options))

    def reverse(self) -> None:
        self._changed(lambda c: c.reverse())

    def copy(self) -> list[Any]:
        return list(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [_plain_copy(v) for v in self]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def _is_known(value: Any) -> bool:
    return isinstance(value, (_Dict, _List))


def _plain_copy(value: Any) -> Any:
    """A deep copy is plain data: what leaves the journal is not followed any more."""
    if isinstance(value, dict):
        return {k: _plain_copy(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain_copy(v) for v in value]
    if isinstance(value, tuple):
        return tuple(_plain_copy(v) for v in value)
    return value


class UndoLogEnvironment:
    """A stateful world over one journal; tools run one at a time.

    Args:
        data: the tables; taken over once.
        step: `(data, action)` changes the data in place and returns the observation, any value as
            text, or an `StepResult`. What it changed before it raised is undone.
        goal: whether the data solve the task.
        key: text of the data; by default the version's own key.
        effect, is_simulator: as for `ImmutableEnvironment`.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        step: Callable[[Any, Any], Any],
        *,
        goal: Callable[[Any], bool] | None = None,
        key: Callable[[Any], str | None] | None = None,
        effect: Effect | Callable[[Any], Effect] = "reversible",
        is_simulator: bool = True,
    ) -> None:
        self.journal = UndoLog(data)
        self._first = self.journal.here
        self._step, self._goal, self._key, self._effect = step, goal, key, effect
        self.is_simulator = is_simulator
        self._lock: asyncio.Lock | None = None

    async def start(self) -> UndoPoint:
        """Return the version of the unchanged data."""
        return self._first

    async def apply(self, handle: UndoPoint, action: Any) -> StepResult:
        """Go to the version, run the tool, and mark what it changed."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            self.journal.go(handle)
            try:
                with boundary(PolicyError, f"action {action_name(action)!r}"):
                    result = self._step(self.journal.data, action)
                    if inspect.isawaitable(result):
                        result = await result
            except PolicyError as exc:
                undone = self.journal.rollback()
                notes = (f"{undone} changes undone",) if undone else ()
                return StepResult(error=str(exc), notes=notes)
            except BaseException:
                self.journal.rollback()  # cancelled in the middle of a tool
                raise
            return self._outcome(result)

    def _outcome(self, result: Any) -> StepResult:
        if isinstance(result, StepResult) and result.error:
            self.journal.rollback()
            return result
        version = self.journal.mark()
        goal = self._goal
        if isinstance(result, StepResult):
            fields = {n: getattr(result, n) for n in StepResult.__dataclass_fields__}
            outcome = StepResult(**fields | {"state": version})
        else:
            text = result if isinstance(result, str) else str(result)
            outcome = StepResult(state=version, observation=text)
        test = None if goal is None else lambda _: goal(self.journal.data)
        return finish_outcome(outcome, self.key, test)

    def fork(self, handle: UndoPoint) -> UndoPoint:
        """A version serves everybody."""
        return handle

    def release(self, handle: UndoPoint) -> None:
        """Nothing to do: a version goes with the last reference to it."""

    def key(self, handle: UndoPoint) -> str | None:
        """Return the text of a version."""
        if self._key is None:
            return handle.key
        self.journal.go(handle)
        return self._key(self.journal.data)

    def effects(self, action: Any) -> Effect:
        """Return the declared effect."""
        return self._effect(action) if callable(self._effect) else self._effect
