"""A path of the tree as a rollout: actions become assistant turns, observations tool turns.

Does not know groups, verifiers or advantages. Source: own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfgrpo.messages import Message, ToolCall
from tfgrpo.rollout import Rollout, Step, Task
from tfgrpo.search.environments.protocol import StepResult
from tfgrpo.search.node import Node
from tfgrpo.search.tree import Tree

__all__ = ["action_message", "path_messages", "rollout_of", "step_of"]


def action_message(action: Any, call_id: str) -> Message:
    """Return an action as the assistant turn that takes it."""
    if isinstance(action, Mapping) and "name" in action:
        arguments = json.dumps(dict(action.get("arguments") or {}), sort_keys=True)
        return Message("assistant", "", (ToolCall(call_id, str(action["name"]), arguments),))
    if isinstance(action, str):
        return Message("assistant", action)
    return Message("assistant", json.dumps(action, sort_keys=True))


def step_of(node: Node, observation: str | None = None) -> Step:
    """Return a node as a step: its action, what came back, and tokens where they are known.

    The id of a call is fixed by the node's depth and action alone, so equal paths make equal text.
    """
    call_id = f"call_{node.depth}"
    message = action_message(node.action, call_id)
    text = node.observation if observation is None else observation
    if node.error and not text:
        text = f"Error: {node.error}"
    observations: tuple[Message, ...] = ()
    if message.tool_calls:
        observations = (Message("tool", text, tool_call_id=call_id),)
    elif text:
        observations = (Message("user", text),)
    proposal = node.proposal
    return Step(
        message,
        observations,
        token_ids=proposal.token_ids if proposal else None,
        logprobs=proposal.logprobs if proposal else None,
        prompt_token_ids=proposal.prompt_token_ids if proposal else None,
    )


def path_messages(tree: Tree, node: Node) -> list[Message]:
    """Return the turns from the first action to `node`, append-only along a path."""
    return [m for n in tree.path(node)[1:] for m in _turns(n)]


def _turns(node: Node) -> tuple[Message, ...]:
    step = step_of(node)
    return (step.action, *step.observations)


def rollout_of(
    task: Task,
    tree: Tree,
    node: Node,
    *,
    outcome: StepResult | None = None,
) -> Rollout:
    """Return the path to `node` as an ungraded rollout, without what it cost.

    Args:
        outcome: of the last action, where it is not in the tree yet.
    """
    nodes = tree.path(node)[1:]
    steps = [step_of(n) for n in nodes]
    if outcome is not None and nodes:
        steps[-1] = step_of(nodes[-1], outcome.observation)
    return Rollout(
        f"{task.task_id}-{node.id}",
        task.task_id,
        tuple(steps),
        is_truncated=any(n.proposal is not None and n.proposal.is_truncated for n in nodes),
    )
