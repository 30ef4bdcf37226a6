"""The library in live prompts: the same bytes and the same hash as in practice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.conftest import Start
from tfgrpo.context import Context, ContextPart
from tfgrpo.experience.artefact import Artefact, export_artefact
from tfgrpo.experience.edits import Edit
from tfgrpo.experience.library import Library, from_texts
from tfgrpo.lm.wire import message_json
from tfgrpo.messages import Message
from tfgrpo.serve.inject import Injection, inject, inject_instructions
from tfgrpo.testing.fault_server import FaultServer

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
PARTS = st.one_of(
    st.builds(lambda t: ContextPart("lesson", text=t), TEXTS.filter(bool)),
    st.builds(
        lambda a, b: ContextPart("exemplar", turns=(Message("user", a), Message("assistant", b))),
        TEXTS,
        TEXTS,
    ),
)
CONTEXTS = st.builds(
    Context, st.lists(PARTS, min_size=1, max_size=4).map(tuple), st.sampled_from(["system", "user"])
)
TURNS = st.lists(
    st.builds(Message, st.sampled_from(["user", "assistant"]), TEXTS), min_size=1, max_size=4
)


@given(system=TEXTS, turns=TURNS, context=CONTEXTS)
def test_a_live_prompt_has_the_bytes_of_the_practised_one(
    system: str, turns: list[Message], context: Context
) -> None:
    from tfgrpo.context import render_messages

    practised = render_messages(turns, context, system=system)
    head = [{"role": "system", "content": system}] if system else []
    sent = [*head, *({"role": t.role, "content": t.content} for t in turns)]
    live = inject(sent, Injection(context, "h", "v"))
    assert live == [message_json(m) for m in practised]


def test_fields_and_parts_of_turns_travel_with_the_library_among_them() -> None:
    context = Context((ContextPart("lesson", text="be brief"),), "user")
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    turns: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "S"}]},
        {"role": "user", "content": "a", "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "x": 1},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "user", "content": [image]},
    ]
    live = inject(turns, Injection(context, "h", "v"))
    assert live[0] == {"role": "developer", "content": "S"}
    assert live[1:4] == turns[1:4]
    assert live[4]["content"][0] == image and "be brief" in live[4]["content"][1]["text"]


def test_instructions_of_the_responses_api_get_the_lessons_after_them() -> None:
    context = Context((ContextPart("lesson", text="be brief"),))
    text = inject_instructions("Answer in French.", Injection(context, "h", "v"))
    (head, _) = inject(
        [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "x"}],
        Injection(context, "h", "v"),
    )
    assert text == head["content"] and text.startswith("Answer in French.")


def saved(folder: Path, *texts: str) -> Artefact:
    artefact = Artefact(from_texts(texts))
    export_artefact(artefact, folder)
    return artefact


async def test_the_gateway_sends_the_library_under_the_hash_of_practice(
    start: Start, tmp_path: Path
) -> None:
    artefact = saved(tmp_path / "library", "Name the unit.", "Check the sign.")
    with FaultServer() as upstream:
        client = await start(upstream, routes={"r": {"library": str(tmp_path / "library")}})
        body = {
            "model": "r",
            "messages": [
                {"role": "system", "content": "You are exact."},
                {"role": "user", "content": "How far?"},
            ],
        }
        async with client.post("/v1/chat/completions", body) as response:
            headers = response.headers
            assert response.status == 200
        practised = Artefact(artefact.library, system="You are exact.")
    sent = upstream.calls[0].body["messages"]
    assert sent == [message_json(m) for m in practised.messages((Message("user", "How far?"),))]
    assert headers["x-tfgrpo-context"] == artefact.context.context_hash
    assert headers["x-tfgrpo-library"] == artefact.library.version_id
    assert client.rows("SELECT library, context FROM requests") == [
        (artefact.library.version_id, artefact.context.context_hash)
    ]


async def test_a_library_that_does_not_fit_the_window_is_left_out_and_said_so(
    start: Start, tmp_path: Path
) -> None:
    saved(tmp_path / "library", "Name the unit. " * 90)
    with FaultServer() as upstream:
        client = await start(
            upstream,
            upstreams={"a": {"context_tokens": 256}},
            routes={"r": {"library": str(tmp_path / "library")}},
        )
        _, _, headers = await client.chat(max_tokens=20)
    assert headers["x-tfgrpo-library"] == "omitted" and headers["x-tfgrpo-context"] == "empty"
    assert upstream.calls[0].body["messages"] == [{"role": "user", "content": "hi"}]


async def test_a_client_may_switch_the_library_off_or_name_a_version_it_has(
    start: Start, tmp_path: Path
) -> None:
    artefact = saved(tmp_path / "library", "Name the unit.")
    with FaultServer() as upstream:
        client = await start(upstream, routes={"r": {"library": str(tmp_path / "library")}})
        _, _, off = await client.chat(tfgrpo={"library": "off"})
        _, _, same = await client.chat(tfgrpo={"library": artefact.library.version_id})
        status, reply, _ = await client.chat(tfgrpo={"library": "0123"})
    assert off["x-tfgrpo-library"] == "empty" and off["x-tfgrpo-arm"] == "pinned"
    assert same["x-tfgrpo-library"] == artefact.library.version_id
    assert (status, reply["error"]["code"]) == (404, "not_found")


async def test_the_holdout_never_gets_the_library_and_is_the_configured_share(
    start: Start, tmp_path: Path
) -> None:
    saved(tmp_path / "library", "Name the unit.")
    with FaultServer() as upstream:
        client = await start(
            upstream, routes={"r": {"library": str(tmp_path / "library"), "holdout": 0.25}}
        )
        arms = [(await client.chat(tfgrpo={"task_id": f"t{i}"}))[2] for i in range(200)]
        again = (await client.chat(tfgrpo={"task_id": "t7"}))[2]
    held = [h for h in arms if h["x-tfgrpo-arm"] == "holdout"]
    # 200 draws at 0.25: five standard deviations are 31.
    assert 19 <= len(held) <= 81
    assert {h["x-tfgrpo-library"] for h in held} == {"empty"}
    assert again["x-tfgrpo-arm"] == arms[7]["x-tfgrpo-arm"]


async def test_a_session_keeps_the_library_of_its_first_turn_also_after_a_restart(
    start: Start, tmp_path: Path
) -> None:
    artefact = saved(tmp_path / "library", "Name the unit.")
    new = Artefact(artefact.library.apply([Edit("add", "Check the sign.")]).library)
    with FaultServer() as upstream:
        client = await start(upstream, routes={"r": {"library": str(tmp_path / "library")}})
        first = (await client.chat(tfgrpo={"session_id": "s"}))[2]
        client.gateway.routes["r"].use(new)
        same = (await client.chat(tfgrpo={"session_id": "s"}))[2]
        other = (await client.chat(tfgrpo={"session_id": "o"}))[2]
        client.gateway.routes["r"].forget_sessions()
        read_back = (await client.chat(tfgrpo={"session_id": "s"}))[2]
    assert first["x-tfgrpo-library"] == same["x-tfgrpo-library"] == artefact.library.version_id
    assert other["x-tfgrpo-library"] == new.library.version_id
    assert read_back["x-tfgrpo-library"] == artefact.library.version_id


def test_an_empty_library_changes_nothing() -> None:
    turns = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]
    assert inject(turns, Injection.of(Artefact(Library()))) == turns


@pytest.mark.parametrize("damage", ["system", "render_hash"])
async def test_a_library_whose_prompt_would_differ_is_refused_at_the_start(
    start: Start, tmp_path: Path, damage: str
) -> None:
    from tfgrpo.errors import ConfigError

    saved(tmp_path / "library", "Name the unit.")
    file = tmp_path / "library" / "library.json"
    file.write_text(file.read_text().replace(f'"{damage}": "', f'"{damage}": "x'))
    with FaultServer() as upstream, pytest.raises(ConfigError, match="sha256"):
        await start(upstream, routes={"r": {"library": str(tmp_path / "library")}})
