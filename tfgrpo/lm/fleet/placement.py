"""Which server of a fleet takes a call: the one that knows its prompt, unless that one is full.

A key (a task with its context, a session) goes to the server with the fewest calls in flight, of
equal ones to its best by rendezvous hashing, and stays there, so that draws of a group and turns of
a conversation find their prefix in the server's cache. A server that has more than `factor` times
the mean in flight is full: its keys go to their next server until it has room.

Does not know health, HTTP or what a call is. Sources: rendezvous hashing (Thaler and Ravishankar
1998), consistent hashing with bounded loads (Mirrokni et al. 2018), two choices (Mitzenmacher
2001); that a key stays where it first went is our own.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.runtime.call_scope import CallScope

__all__ = ["Placement", "affinity_key", "capacity", "preference"]

_REMEMBERED = 65_536


def preference(key: str, servers: Sequence[str]) -> list[str]:
    """Return the servers by rendezvous hashing, best first: one that leaves moves only its keys.

    >>> preference("task", ["a", "b", "c"]) == preference("task", ["c", "a", "b"])
    True
    """

    def weight(server: str) -> bytes:
        return hashlib.blake2b(f"{key}\0{server}".encode(), digest_size=8).digest()

    return sorted(servers, key=weight, reverse=True)


def capacity(in_flight: float, servers: int, factor: float, room: int) -> int:
    """Return how many calls one server may have when one more is placed.

    >>> capacity(79, 8, 1.25, 4)
    13
    """
    return max(room, math.ceil(factor * (in_flight + 1) / servers))


def affinity_key(turns: Sequence[Mapping[str, Any]], scope: CallScope) -> str:
    """Return what calls share whose prompts begin alike; empty for a prompt without turns.

    A task (or session) of the running scope with its first turn, which holds instructions and
    lessons; without one, the turns up to the first of the user.
    """
    if not turns:
        return ""
    until = 1
    if not scope.task_id:
        roles = [turn.get("role") for turn in turns]
        until = roles.index("user") + 1 if "user" in roles else 1
    head = [[turn.get("role"), turn.get("content")] for turn in turns[:until]]
    text = json.dumps([scope.task_id, head], ensure_ascii=True, default=str)
    return hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()


class Placement:
    """Orders the servers of a fleet for each call, and remembers where keys are at home.

    Args:
        factor: bound on a server's calls in flight, as a multiple of the mean.
        room: calls that a server may always have.
        rng: chance for calls without a key.
    """

    def __init__(
        self, factor: float = 1.25, room: int = 16, *, rng: random.Random | None = None
    ) -> None:
        self._factor, self._room = factor, room
        self._rng = rng or random.Random(0)
        self._homes: OrderedDict[str, str] = OrderedDict()

    def order(self, key: str, loads: Mapping[str, float]) -> list[str]:
        """Return the servers in the order in which a call should try them.

        Args:
            key: of the call; empty for none.
            loads: calls in flight of each server that may be used.
        """
        names = list(loads)
        if len(names) < 2:
            return names
        if not key:
            first = min(self._rng.sample(names, 2), key=loads.__getitem__)
            return [first, *sorted((n for n in names if n != first), key=loads.__getitem__)]
        limit = capacity(sum(loads.values()), len(names), self._factor, self._room)
        home, ranked = self.home(key), preference(key, names)
        if home not in loads:
            home = min(ranked, key=loads.__getitem__)
        self._keep(key, home)
        ranked = [home, *(n for n in ranked if n != home)]
        has_room = [n for n in ranked if loads[n] < limit]
        full = sorted((n for n in ranked if loads[n] >= limit), key=loads.__getitem__)
        return has_room + full

    def home(self, key: str) -> str:
        """Return the server where a key is at home; empty where it has none."""
        return self._homes.get(key, "")

    def _keep(self, key: str, server: str) -> None:
        self._homes[key] = server
        self._homes.move_to_end(key)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
