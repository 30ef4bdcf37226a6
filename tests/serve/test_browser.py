"""The whole loop without a line of code: an agent, ratings, the page in a browser."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.learning.worlds import HELPFUL, critic_reply
from tests.patience import LONG_S
from tests.serve.conftest import ADMIN, Client, Start
from tests.serve.test_proposing import TASKS
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(LONG_S)]

LEARN: dict[str, Any] = {
    "min_informative": 3,
    "settings": {"entries": "lessons"},
    "feedback": {"window_h": 0.0001},
    "canary": {"shares": [0.5], "min_units": 10, "max_cost_factor": 100.0},
}


class World:
    """A model that is right as often as a set of lessons lets it be, and a user who rates it."""

    def __init__(self, with_lesson: float, without: float) -> None:
        self.with_lesson, self.without = with_lesson, without
        self.rng = random.Random(0)

    def __call__(self, call: Any) -> answers.Answer:
        text = "\n".join(str(m.get("content")) for m in call.body["messages"])
        task = next((t for t in TASKS if str(t.prompt) in text), TASKS[0])
        chance = self.with_lesson if HELPFUL in text else self.without
        is_right = self.rng.random() < chance
        return answers.say(str(task.reference) if is_right else "no idea")


async def agent(client: Client, n: int, mark: str) -> None:
    """An agent that asks, and whose users rate each answer."""

    async def one(i: int) -> None:
        task = TASKS[i % len(TASKS)]
        _, reply, _ = await client.chat(str(task.prompt), tfgrpo={"session_id": f"{mark}{i}"})
        is_right = reply["choices"][0]["message"]["content"] == str(task.reference)
        record = {"response_id": reply["id"], "value": is_right}
        async with client.post("/v1/feedback", record) as response:
            assert response.status == 201

    for at in range(0, n, 20):
        await asyncio.gather(*(one(at + k) for k in range(20)))


async def practise(client: Client) -> None:
    """Attempts at the same tasks, some right and some wrong."""
    for i in range(4):
        for value in (1.0, 0.0):
            prompt = str(TASKS[i].prompt)
            _, reply, _ = await client.chat(prompt, tfgrpo={"task_id": f"task-{i}"})
            record = {"response_id": reply["id"], "value": value}
            async with client.post("/v1/feedback", record) as response:
                assert response.status == 201


async def signed_in(browser: Any, client: Client, said: list[str], **context: Any) -> Any:
    page = await (await browser.new_context(**context)).new_page()
    own = client.running.page_url
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(own) else said.append(r.url))
    await page.goto(own)
    await page.fill("input[name=secret]", ADMIN)
    await page.click("button:has-text('Sign in')")
    await page.click("a[href='/routes/r']")
    return page


async def until(client: Client, page: Any, name: str) -> None:
    """Let the job tick until the page shows a state."""
    learning = client.running.learning.routes["r"]
    deadline = time.monotonic() + 120
    while learning.state.name != name:
        assert time.monotonic() < deadline, (learning.state, learning.verdict)
        await learning.tick()
        await asyncio.sleep(0.05)
    await page.reload()
    assert name in await page.inner_text(".hero")


async def test_from_an_agent_to_a_promoted_library_and_back_by_clicks_alone(
    start: Start, browser: Any, tmp_path: Path
) -> None:
    critic = FaultServer(lambda call: critic_reply(call.body["messages"][0]["content"], HELPFUL))
    with FaultServer(World(0.95, 0.4)) as upstream, critic:
        route = {"capture": True, "groups": {"size": 2},
                 "learn": {**LEARN, "critic": critic.spec("critic")}}  # fmt: skip
        client = await start(upstream, serve={"admin_listen": "127.0.0.1:0"}, routes={"r": route})
        said: list[str] = []
        await practise(client)
        page = await signed_in(browser, client, said, viewport={"width": 1100, "height": 900})
        await until(client, page, "waiting")
        assert HELPFUL in await page.inner_text("main")
        await page.click("button:has-text('Approve for the live test')")
        assert "canary" in await page.inner_text(".hero")
        await agent(client, 300, "one")
        await asyncio.sleep(0.4)  # the windows of feedback close: 0.36 s
        await until(client, page, "watched")
        _, _, after = await client.chat(str(TASKS[0].prompt))
        promoted = client.gateway.routes["r"].current.version
        assert after["x-tfgrpo-library"] == promoted != "empty"
        await page.check("input[name=now]")
        await page.click("button:has-text('Roll back now')")
        assert "collecting" in await page.inner_text(".hero")
        _, _, back = await client.chat(str(TASKS[0].prompt))
        assert back["x-tfgrpo-library"] == "empty"
        history = await page.inner_text("table >> nth=-1")
    assert said == []
    assert all(event in history for event in ("propose", "approve", "promote", "roll_back"))
    events = [r[0] for r in client.rows("SELECT event FROM transitions ORDER BY version")]
    assert events == ["propose", "proposed", "gated", "approve", "promote", "roll_back"]
    people = client.rows("SELECT event FROM transitions WHERE who = 'person' ORDER BY version")
    assert people == [("approve",), ("roll_back",)]


async def test_a_harmful_library_goes_by_itself_and_a_rejected_one_is_never_live(
    start: Start, browser: Any
) -> None:
    critic = FaultServer(lambda call: critic_reply(call.body["messages"][0]["content"], HELPFUL))
    with FaultServer(World(0.1, 0.9)) as upstream, critic:
        route = {"capture": True, "groups": {"size": 2},
                 "learn": {**LEARN, "critic": critic.spec("critic")}}  # fmt: skip
        client = await start(upstream, serve={"admin_listen": "127.0.0.1:0"}, routes={"r": route})
        said: list[str] = []
        await practise(client)
        page = await signed_in(browser, client, said)
        await until(client, page, "waiting")
        await page.click("button:has-text('Approve for the live test')")
        await agent(client, 400, "two")
        await asyncio.sleep(0.4)
        await until(client, page, "collecting")
        assert "harm" in await page.inner_text(".hero")
        _, _, headers = await client.chat(str(TASKS[0].prompt))
        assert headers["x-tfgrpo-library"] == "empty" and said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_model_text_is_text_in_both_themes_and_on_a_phone(
    start: Start, browser: Any, scheme: str
) -> None:
    from tests.serve.test_loop import LEARN as SIMPLE
    from tests.serve.test_loop import Loop, proposer

    text = 'Name <img src="http://evil.example/x" onerror="alert(1)"> <script>alert(2)</script>'
    with FaultServer() as upstream:
        client = await start(upstream, serve={"admin_listen": "127.0.0.1:0"}, routes={"r": SIMPLE})
        learning = client.running.learning.routes["r"]
        learning._proposer = proposer(text)
        loop = Loop(client)
        loop.learning = learning
        await loop.to_waiting()
        said: list[str] = []
        page = await signed_in(
            browser, client, said, color_scheme=scheme, viewport={"width": 390, "height": 844}
        )
        assert text in await page.inner_text("main")
        assert await page.locator("main img, main script").count() == 0
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(x) for x in background.removeprefix("rgb(").rstrip(")").split(","))
        await page.click("button:has-text('Reject')")
        assert "collecting" in await page.inner_text(".hero")
    assert said == [] and (brightness > 600) == (scheme == "light")
