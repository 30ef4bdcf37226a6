"""An end user's content is removed from everywhere; figures stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.serve.conftest import ADMIN, Client, Start
from tests.serve.test_loop import LEARN
from tfgrpo.experience.edits import Edit
from tfgrpo.experience.entry import Provenance
from tfgrpo.serve.learning.proposing import AskedQuestion, PendingLibrary
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer

PRIVATE = "my-private-word"


def everywhere(folder: Path) -> bytes:
    """Return all bytes of a gateway's folder."""
    return b"".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())


async def ask(client: Client, text: str, user: str, task: str, value: float) -> str:
    ext = {"task_id": task, "end_user": user, "metadata": {"note": f"of {text}"}}
    headers = {"idempotency-key": f"{user}-{task}-{value}"}
    _, reply, _ = await client.chat(text, tfgrpo=ext, headers=headers)
    record = {"response_id": reply["id"], "value": value, "comment": f"about {text}"}
    async with client.post("/v1/feedback", record) as response:
        assert response.status == 201
    return str(reply["id"])


def cites(asked: AskedQuestion) -> PendingLibrary:
    """A proposal whose entry says which groups it was drawn from, and that keeps a file."""
    asked.folder.mkdir(parents=True)
    (asked.folder / "traces.jsonl").write_text(repr([g.task for g in asked.groups]))
    from dataclasses import replace

    source = Provenance(group_ids=tuple(g.group_id for g in asked.groups))
    edit = Edit("add", "Name the unit.", provenance=source)
    library = asked.current.library.apply([edit]).library
    return PendingLibrary(replace(asked.current, library=library), {})


async def learnt(start: Start, upstream: FaultServer, **more: Any) -> Client:
    """A gateway that has learnt from two users."""
    client = await start(upstream, routes={"r": LEARN}, **more)
    learning = client.running.learning.routes["r"]
    learning._proposer = cites
    for user, text in (("ann", PRIVATE), ("bob", "a public word")):
        for value in (1.0, 0.0):
            await ask(client, f"{text} of {user}", user, f"t-{user}", value)
    await learning.tick()
    assert learning.state.name == "waiting", learning.state
    return client


def echo(call: Any) -> Any:
    return answers.say(f"You said: {call.text}")


async def test_nothing_of_the_user_is_left_in_any_file_and_figures_stay(start: Start) -> None:
    with FaultServer(echo) as upstream:
        client = await learnt(start, upstream, serve={"admin_listen": "127.0.0.1:0"})
        client.gateway.journal.writer.flush()
        folder = client.gateway.folder
        assert PRIVATE.encode() in everywhere(folder)
        url = client.running.page_url + "admin/forget"
        bearer = {"authorization": f"Bearer {ADMIN}"}
        async with client.session.post(url, json={"end_user": "ann"}, headers=bearer) as response:
            removed = await response.json()
        found = everywhere(folder)
        spent = client.rows("SELECT count(*), sum(cost_usd) FROM results")
    assert PRIVATE.encode() not in found and b"a public word" in found
    assert removed["requests"] == 2 and removed["groups"] == 1
    assert [text for _, _, text in removed["entries"]] == ["Name the unit."]
    assert spent[0][0] == 5 and spent[0][1] > 0  # four replies and the proposal's purse


async def test_of_one_keys_clients_alone(start: Start) -> None:
    from tfgrpo.serve.content import forget

    with FaultServer(echo) as upstream:
        client = await learnt(start, upstream)
        gateway = client.gateway
        removed = forget(gateway.journal, gateway.folder, gateway.secret, "ann", "another")
        assert removed.requests == 0 and PRIVATE.encode() in everywhere(gateway.folder)
        kept = client.rows("SELECT count(*) FROM requests WHERE prompt NOT NULL")
    assert kept == [(4,)]


async def test_the_command_works_on_a_gateway_that_is_not_running(
    start: Start, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from tfgrpo.cli.serve import app

    with FaultServer(echo) as upstream:
        client = await learnt(start, upstream)
        config = tmp_path / "gateway.toml"
        config.write_text(
            f'[serve]\nfolder = "{client.gateway.folder}"\n[upstreams.a]\nlm = "scripted:echo"\n'
            '[routes.r]\nupstreams = ["a"]\n'
        )
        arguments = ["forget", str(config), "--end-user", "ann"]
        refused = CliRunner().invoke(app, arguments)
        assert refused.exception is not None and "in use" in str(refused.exception)
        await client.running.stop(0.0)
        done = CliRunner().invoke(app, arguments)
        damaged = client.gateway.folder / "run.db.damaged1"
        damaged.write_text(PRIVATE)
        told = CliRunner().invoke(app, arguments).output
        assert f"{damaged} is kept from a mended journal and may hold it still: delete" in told
        damaged.unlink()
        nobody = CliRunner().invoke(app, [*arguments[:-1], ""])
        assert "end user is empty" in str(nobody.exception)
    assert "content of 2 requests and 1 groups" in done.output
    assert "Name the unit." in done.output
    assert PRIVATE.encode() not in everywhere(client.gateway.folder)


async def test_content_that_is_too_old_goes_from_groups_and_proposals_too(start: Start) -> None:
    with FaultServer(echo) as upstream:
        client = await learnt(start, upstream)
        client.gateway.journal.writer.connection.execute(
            "UPDATE requests SET at = at - 40 * 86400 WHERE task_id = 't-ann'"
        )
        client.running.learning.purge()
        await client.running.stop(0.0)
    found = everywhere(client.gateway.folder)
    assert PRIVATE.encode() not in found and b"a public word" in found


async def test_a_page_asks_who_is_to_be_forgotten(start: Start) -> None:
    from tests.serve.test_loop import page

    with FaultServer(echo) as upstream:
        client = await learnt(start, upstream, serve={"admin_listen": "127.0.0.1:0"})
        _, _, headers = await page(client, "/login", secret=ADMIN)
        cookie = headers["set-cookie"].split(";")[0]
        _, html, _ = await page(client, "/", cookie)
        token = html.split('name="token" value="', 1)[1].split('"', 1)[0]
        refused = await page(client, "/admin/forget", cookie, end_user="ann", token="wrong")
        status, told, _ = await page(client, "/admin/forget", cookie, end_user="ann", token=token)
    assert refused[0] == 403
    assert status == 200 and "2 requests" in told and "Name the unit." in told


async def test_learning_goes_on_after_old_groups_have_gone(start: Start) -> None:
    with FaultServer(echo) as upstream:
        client = await learnt(start, upstream)
        learning = client.running.learning.routes["r"]
        await learning.act("reject", "person")
        client.gateway.journal.writer.connection.execute("UPDATE requests SET at = at - 40 * 86400")
        client.running.learning.purge()
        await learning.tick()
        assert learning.state.name == "collecting"
        for user in ("cid", "dan"):
            for value in (1.0, 0.0):
                await ask(client, f"word of {user}", user, f"t-{user}", value)
        await learning.tick()
        proposals = [t.body["group_ids"] for t in learning.transitions if t.event == "propose"]
    assert [len(ids) for ids in proposals] == [2, 2] and not set(proposals[0]) & set(proposals[1])
