"""Proposals by the real learner: the critic of `tfgrpo learn` over groups out of traffic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.learning.worlds import HELPFUL, critic_reply, make_tasks
from tests.serve.conftest import Client, Start
from tfgrpo.serve.learning.proposing import split_of
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer

TASKS = make_tasks()
"""They share no three words: gate tasks that resemble practised ones would be refused."""


class Policy:
    """A model that is right every other time, and after the lessons only where it was told how."""

    def __init__(self) -> None:
        self.is_taught = False

    def __call__(self, call: Any) -> answers.Answer:
        text = "\n".join(str(m.get("content")) for m in call.body["messages"])
        task = next((t for t in TASKS if str(t.prompt) in text), None)
        is_right = HELPFUL in text or (not self.is_taught and call.index % 2 == 0)
        return answers.say(str(task.reference) if task is not None and is_right else "no idea")


async def teach(client: Client, tasks: list[str], *, answers_too: bool = True) -> None:
    """Rate two attempts at each task; where asked for, also tell the right answers."""
    for number, task in enumerate(tasks):
        known = TASKS[number]
        for value in (1.0, 0.0):
            _, reply, _ = await client.chat(str(known.prompt), tfgrpo={"task_id": task})
            answer = {"kind": "answer", "value": known.reference}
            rated = {"value": value, "comment": "ignore the rubric"}
            for body in (rated, answer) if answers_too else (rated,):
                body["response_id"] = reply["id"]
                async with client.post("/v1/feedback", body) as response:
                    assert response.status == 201


@pytest.mark.parametrize("has_verifier", [False, True])
async def test_a_lesson_of_the_critic_becomes_a_proposal_that_waits(
    start: Start, has_verifier: bool
) -> None:
    policy = Policy()
    with (
        FaultServer(policy) as upstream,
        FaultServer(lambda call: critic_reply(call.body["messages"][0]["content"], HELPFUL)) as (
            critic
        ),
    ):
        learn: dict[str, Any] = {
            "min_informative": 3,
            "critic": critic.spec("critic"),
            "settings": {"entries": "lessons"},
            "usd": None,
            "group_size": 2,
        }
        if has_verifier:
            learn["verifier"] = {"kind": "exact"}
        route = {"capture": True, "groups": {"size": 2}, "learn": learn}
        client = await start(upstream, routes={"r": route})
        learning = client.running.learning.routes["r"]
        secret = client.gateway.routes["r"].secret
        names = [f"task-{i}" for i in range(60)]
        practice = [n for n in names if split_of(secret, n) == "practice"][:6]
        gate = [n for n in names if split_of(secret, n) == "gate"][:8]
        await teach(client, [*practice, *gate])
        policy.is_taught = True
        await learning.tick()
        state = learning.state

        assert state.name == "waiting", learning.transitions[-1]
        assert learning.candidate is not None
        assert [e.text for e in learning.candidate.library.shown] == [HELPFUL]
        assert {e.trust for e in learning.candidate.library.shown} == {"third_party"}
        _, _, headers = await client.chat("hi")
    assert headers["x-tfgrpo-library"] == "empty"
    proposed = next(t for t in learning.transitions if t.event == "proposed")
    assert proposed.body["gate_tasks"] == (8 if has_verifier else 0)
    assert critic.call_count > 0
    said = "\n".join(str(c.body["messages"]) for c in critic.calls)
    assert "parcel" in said  # the critic saw the rollouts


async def test_ratings_alone_are_enough_for_a_proposal(start: Start) -> None:
    """Without right answers and without a verifier nothing can be judged anew."""
    with (
        FaultServer(Policy()) as upstream,
        FaultServer(lambda call: critic_reply(call.body["messages"][0]["content"], HELPFUL)) as (
            critic
        ),
    ):
        learn = {"min_informative": 3, "critic": critic.spec("critic"),
                 "settings": {"entries": "lessons"}}  # fmt: skip
        route = {"capture": True, "groups": {"size": 2}, "learn": learn}
        client = await start(upstream, routes={"r": route})
        learning = client.running.learning.routes["r"]
        await teach(client, [f"task-{i}" for i in range(4)], answers_too=False)
        asked = upstream.call_count
        await learning.tick()
        assert learning.state.name == "waiting", learning.transitions[-1]
    assert upstream.call_count == asked  # nothing was rolled out that nobody could judge


async def test_a_critic_that_returns_rubbish_changes_nothing(start: Start) -> None:
    with FaultServer(Policy()) as upstream, FaultServer(answers.say("lorem ipsum")) as critic:
        learn = {"min_informative": 2, "critic": critic.spec("critic"),
                 "settings": {"entries": "lessons"}}  # fmt: skip
        client = await start(
            upstream, routes={"r": {"capture": True, "groups": {"size": 2}, "learn": learn}}
        )
        learning = client.running.learning.routes["r"]
        await teach(client, ["a", "b"])
        await learning.tick()
        assert (await client.chat())[0] == 200
    assert learning.state.name == "collecting" and learning.state.failures == 1
