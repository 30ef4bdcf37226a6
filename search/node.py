"""One node of a search tree, its action, and the records that travel between the parts.

A node is one candidate action (an API call or a reasoning step); the path from the root is a plan.
Actions are plain JSON: `call("open", door="red")` for a tool, a string for a step of text.

Does not know algorithms, models or environments. Source: own.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from tfgrpo.rollout import Usage

__all__ = [
    "FINISH",
    "NO_PARTS",
    "Node",
    "NodeScore",
    "Proposal",
    "Status",
    "action_key",
    "action_name",
    "make_node",
    "call",
    "show_action",
]

Status = Literal["open", "in_flight", "expanded", "terminal", "dead", "pruned"]
"""`open`: generated, not yet worked on. `in_flight`: being worked on. `expanded`: has had its
children made. `terminal`: a finished path. `dead`: its action failed, or nothing can follow.
`pruned`: dropped by the algorithm or equal to another state."""

FINISH = "finish"
"""Name of the action that ends a path where no environment says so itself."""


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    """Return the action that calls a tool."""
    return {"name": name, "arguments": arguments}


def action_key(action: Any) -> str:
    """Return one text for an action: equal exactly when the actions mean the same.

    Keys are sorted, whole floats become integers, strings are NFC with outer space removed.

    >>> action_key(call("f", b=1.0, a=" x ")) == action_key(call("f", a="x", b=1))
    True
    >>> action_key(call("f", a=1)) == action_key(call("f", a=True))
    False
    """
    if type(action) is str:
        if action.isascii():
            return action.strip()
        return unicodedata.normalize("NFC", action).strip()
    return json.dumps(_normal(action), sort_keys=True, separators=(",", ":"))


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value).strip()
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(k): _normal(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_normal(v) for v in value]
    raise TypeError(f"{type(value).__name__} is no part of an action; use JSON values: {value!r}")


def action_name(action: Any) -> str:
    """Return the tool's name, or the text itself for a step of text."""
    if isinstance(action, Mapping) and "name" in action:
        return str(action["name"])
    return action if isinstance(action, str) else action_key(action)


def show_action(action: Any, limit: int = 80) -> str:
    """Return an action as one short line for people.

    >>> show_action(call("move", room="hall", steps=2))
    "move(room='hall', steps=2)"
    """
    if isinstance(action, Mapping) and "name" in action:
        inner = ", ".join(f"{k}={v!r}" for k, v in dict(action.get("arguments") or {}).items())
        text = f"{action['name']}({inner})"
    else:
        text = action if isinstance(action, str) else action_key(action)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


@dataclass(frozen=True, slots=True)
class Proposal:
    """One distinct next action that an expander offers."""

    action: Any
    count: int = 1
    """How many of the samples said this."""
    text: str = ""
    """What the model wrote."""
    prior: float | None = None
    """Probability of the action, where known; else the driver takes count / samples."""
    entropy: float | None = None
    """Mean entropy of the first tokens divided by the log of the alternatives, in [0, 1]."""
    tokens: tuple[str, ...] = ()
    """The tokens of `text`, where the engine tells them."""
    top_logprobs: tuple[Mapping[str, float], ...] = ()
    """Per token: alternative to natural-log probability."""
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    arm: int = 0
    """Which proposer made it, where there are several."""
    is_truncated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, empty fields left out."""
        row: dict[str, Any] = {"action": self.action}
        for name in ("text", "prior", "entropy", "token_ids", "logprobs", "prompt_token_ids"):
            value = getattr(self, name)
            if value is not None and value != "":
                row[name] = value
        for name in ("tokens", "top_logprobs"):
            if getattr(self, name):
                row[name] = [v if isinstance(v, str) else dict(v) for v in getattr(self, name)]
        if self.count != 1:
            row["count"] = self.count
        if self.arm:
            row["arm"] = self.arm
        if self.is_truncated:
            row["is_truncated"] = True
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Proposal:
        """Restore a proposal from its JSON form."""
        fields = dict(row)
        for name in ("tokens", "top_logprobs", "token_ids", "logprobs", "prompt_token_ids"):
            if fields.get(name) is not None:
                fields[name] = tuple(fields[name])
        return cls(**fields)


NO_PARTS: Mapping[str, float] = MappingProxyType({})
"""What a score without components has; one object for all."""


class NodeScore(NamedTuple):
    """What a scorer says about one node; the direction is in the name.

    Costs are better when lower, values when higher. A field that is None is not said.
    """

    step_cost: float = 1.0
    """Cost of the node's own action, at least 0; `g` is its sum along the path."""
    to_go: float = 0.0
    """Estimated cost from here to a finish; becomes `h`."""
    value: float | None = None
    """How good the node is, where the scorer judges values."""
    parts: Mapping[str, float] = NO_PARTS
    """Named components, kept for views."""
    scorer_state: Any = None
    """Whatever the scorer wants to find again at the children; not saved."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        row: dict[str, Any] = {"step_cost": self.step_cost, "to_go": self.to_go}
        if self.value is not None:
            row["value"] = self.value
        if self.parts:
            row["parts"] = dict(self.parts)
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> NodeScore:
        """Restore a score from its JSON form."""
        return cls(**row)


@dataclass(slots=True, eq=False)
class Node:
    """A place in the tree. Only the tree and the algorithm change it."""

    id: int
    """Position in the tree's list; -1 until the node is committed."""
    parent: int
    """Id of the parent; -1 for the root."""
    depth: int
    action: Any = None
    action_key: str = ""
    count: int = 1
    """How many samples proposed it."""
    prior: float = 1.0
    """Share of the samples, or the model's probability."""
    status: Status = "open"
    step_cost: float = 0.0
    g: float = 0.0
    h: float = 0.0
    value: float | None = None
    visits: int = 0
    value_sum: float = 0.0
    leaves: int = 1
    """Places at or below it that can still be visited, where the algorithm counts visits."""
    open_children: list[Node] | None = field(default=None, repr=False)
    """The children that can be visited, where the algorithm walks down to its leaves."""
    seq: int = 0
    """Number of the visit that made it."""
    children: Sequence[int] = ()
    """Ids; only `Tree` changes them. Leaves share the empty tuple."""
    parts: Mapping[str, float] | None = None
    proposal: Proposal | None = None
    scorer_state: Any = None
    """The scorer's own notes, such as LCS rows."""
    state: Any = None
    """The environment's handle; opaque."""
    state_key: str | None = None
    is_executed: bool = False
    is_broken: bool = False
    """Its own action failed, so nothing can follow."""
    is_terminal: bool = False
    is_goal: bool = False
    reward: float | None = None
    observation: str = ""
    error: str = ""
    usage: Usage | None = None
    """What its own expansion cost."""

    @property
    def mean_value(self) -> float:
        """Average of the values backed up through here; 0 before the first."""
        return self.value_sum / self.visits if self.visits else 0.0


def make_node(
    node_id: int,
    parent: Node,
    proposal: Proposal,
    prior: float,
    g: float,
    score: NodeScore,
    seq: int,
) -> Node:
    """Return the node that a proposal and its score make: as `Node(...)`, in half the time.

    Most of a node's life is its birth, and a constructor spends most of that on passing defaults.
    """
    node = _new(Node)  # one assignment a line: that is what the interpreter does fastest
    node.id = node_id
    node.parent = parent.id
    node.depth = parent.depth + 1
    node.action = proposal.action
    node.action_key = action_key(proposal.action)
    node.count = proposal.count
    node.prior = prior
    node.status = "open"
    node.step_cost, node.h, node.value, node.parts, node.scorer_state = score
    node.g = g
    node.visits = 0
    node.value_sum = 0.0
    node.leaves = 1
    node.open_children = None
    node.seq = seq
    node.children = ()
    node.proposal = proposal
    node.state = None
    node.state_key = None
    node.is_executed = False
    node.is_broken = False
    node.is_terminal = False
    node.is_goal = False
    node.reward = None
    node.observation = ""
    node.error = ""
    node.usage = None
    return node


_new = object.__new__
