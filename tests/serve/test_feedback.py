"""Feedback: written before it is acknowledged, and the same sum in any order of arrival."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.conftest import Client, Start
from tfgrpo.serve.access.keys import hash_key, new_key
from tfgrpo.serve.learning.ratings import FeedbackRow, rate
from tfgrpo.serve.settings import FeedbackSettings
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer

SETTINGS = FeedbackSettings()


def row(
    name: str,
    value: Any,
    at: float,
    *,
    source: str = "human",
    kind: str = "reward",
    choice: int | None = None,
) -> FeedbackRow:
    return FeedbackRow(0, name, at, at, "response", "x", choice, "reward", kind, value, source)


def test_the_later_statement_of_a_source_replaces_the_earlier_one() -> None:
    rows = [row("a", 1.0, 1), row("b", 0.25, 2)]
    assert rate(rows, SETTINGS).reward == rate(rows[::-1], SETTINGS).reward == 0.25
    assert rate(rows, SETTINGS).revision == 2


def test_a_withdrawn_record_takes_what_it_replaced_with_it() -> None:
    rows = [row("a", 1.0, 1), row("b", 0.0, 2), row("t", "b", 3, kind="withdrawn")]
    assert rate(rows, SETTINGS).reward is None
    assert rate([*rows, row("c", 0.5, 4)], SETTINGS).reward == 0.5
    # What was replaced may be withdrawn without a change.
    assert rate([*rows[:2], row("t", "a", 3, kind="withdrawn")], SETTINGS).reward == 0.0


def test_the_highest_rank_decides_and_the_others_stay_as_parts() -> None:
    rows = [
        row("a", 0.2, 1, source="judge"),
        row("b", 0.4, 2, source="human:ann"),
        row("c", 0.6, 3, source="human:bob"),
        row("d", 0.1, 4, source="implicit"),
    ]
    rating = rate(rows, SETTINGS)
    assert rating.reward == pytest.approx(0.5)
    assert rating.parts["reward/judge"] == 0.2 and rating.sources == ("human:ann", "human:bob")
    assert rating.is_conflict  # 0.6 against 0.1
    assert rate([*rows, row("e", 0.9, 5, source="verifier")], SETTINGS).reward == 0.9


def test_a_contradiction_is_a_conflict_until_a_person_settles_it() -> None:
    rows = [row("a", 1.0, 1, source="human:ann"), row("b", 0.5, 2, source="human:bob")]
    assert rate(rows, SETTINGS).is_conflict
    assert not rate([rows[0], row("b", 0.51, 2, source="human:bob")], SETTINGS).is_conflict
    settled = rate([*rows, row("s", 0.0, 3, kind="settled", source="human:page")], SETTINGS)
    assert settled.reward == 0.0 and not settled.is_conflict


def test_values_are_scaled_by_the_declared_range_and_silence_is_not_zero() -> None:
    stars = FeedbackSettings(low=1, high=5)
    assert rate([row("a", 4, 1)], stars).reward == 0.75
    assert rate([row("a", True, 1)], stars).reward == 1.0
    assert rate([], stars).reward is None


def test_feedback_on_one_choice_is_not_the_others() -> None:
    rows = [row("a", 1.0, 1, choice=0), row("b", 0.0, 1, choice=1)]
    assert [rate(rows, SETTINGS, c).reward for c in (0, 1, 2)] == [1.0, 0.0, None]


def test_a_sessions_value_is_a_part_and_no_reward_of_its_responses() -> None:
    session = [FeedbackRow(0, "s", 1, 1, "session", "s", None, "reward", "reward", 1.0)]
    rating = rate([], SETTINGS, None, session)
    assert rating.reward is None and rating.parts == {"session": 1.0}


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("post"),
            st.sampled_from(["human", "judge", "human:bob"]),
            st.integers(0, 4),
            st.integers(0, 3),
        ),
        st.tuples(st.just("withdraw"), st.integers(0, 5)),
    ),
    max_size=6,
)


@given(EVENTS, st.randoms(use_true_random=False))
def test_any_order_of_arrival_gives_the_same_rating(events: list[Any], rng: Any) -> None:
    rows: list[FeedbackRow] = []
    for number, event in enumerate(events):
        if event[0] == "post":
            rows.append(row(f"f{number}", event[2] / 4, event[3], source=event[1]))
        elif rows:
            gone = rows[event[1] % len(rows)]
            if gone.kind != "withdrawn":
                rows.append(row(f"t{number}", gone.feedback_id, 9, kind="withdrawn"))
    first = rate(rows, SETTINGS)
    for order in itertools.islice(itertools.permutations(rows), 60):
        assert rate(list(order), SETTINGS) == first
    repeated = [*rows, *rng.sample(rows, len(rows))]
    again = rate(repeated, SETTINGS)
    assert (again.reward, again.parts, again.is_conflict) == (
        first.reward,
        first.parts,
        first.is_conflict,
    )


async def post(client: Client, **body: Any) -> tuple[int, Any]:
    headers = body.pop("headers", {})
    async with client.post("/v1/feedback", body, **headers) as response:
        return response.status, await response.json()


async def shown(client: Client, response_id: str) -> Any:
    async with client.get(f"/v1/feedback?response_id={response_id}") as response:
        return await response.json()


async def test_a_record_counts_once_however_often_it_is_sent(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        _, reply, _ = await client.chat()
        sent = {"response_id": reply["id"], "value": 0.5, "event_id": "e1"}
        first = await post(client, **sent)
        replies = await asyncio.gather(*(post(client, **sent) for _ in range(8)))
        other = await post(client, **{**sent, "value": 0.6})
        found = await shown(client, reply["id"])
    assert first[0] == 201 and {r[0] for r in replies} == {200}
    assert {r[1]["id"] for r in replies} == {first[1]["id"]}
    assert (other[0], other[1]["error"]["code"]) == (422, "idempotency_key_reused")
    assert len(found["data"]) == 1 and found["reward"] == 0.5


async def test_eight_records_with_one_event_at_once_are_one(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        _, reply, _ = await client.chat()
        sent = {"response_id": reply["id"], "value": 1, "headers": {"idempotency_key": "k"}}
        replies = await asyncio.gather(*(post(client, **dict(sent)) for _ in range(8)))
    assert sorted(r[0] for r in replies) == [200] * 7 + [201]
    assert client.rows("SELECT count(*) FROM feedback") == [(1,)]


async def test_feedback_may_come_while_the_reply_is_still_streaming(start: Start) -> None:
    chunk = {"id": "u", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
    with FaultServer(answers.events([chunk] * 30).drip(0.01, size=80)) as upstream:
        client = await start(upstream)
        body = {"model": "r", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with client.post("/v1/chat/completions", body) as response:
            status, _ = await post(
                client, response_id=response.headers["x-tfgrpo-response-id"], value=1
            )
            assert not client.rows("SELECT 1 FROM replies")
            await response.read()
    assert status == 201


async def test_withdrawn_and_late_records_are_shown_and_do_not_count(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        _, reply, _ = await client.chat()
        _, first = await post(client, response_id=reply["id"], value=1.0, at=100.0)
        await post(client, response_id=reply["id"], value=0.0, at=50.0)  # an older statement
        assert (await shown(client, reply["id"]))["reward"] == 1.0
        for _ in range(2):
            async with client.session.delete(f"{client.url}/v1/feedback/{first['id']}") as response:
                assert response.status == 200
        found = await shown(client, reply["id"])
    assert found["reward"] is None
    assert not any(r["in_force"] for r in found["data"])


BAD: list[dict[str, Any]] = [
    {"value": float("1e9")},
    {"value": -0.1},
    {"value": "good"},
    {"value": None},
    {"value": [1]},
    {"value": 1, "kind": "vibe"},
    {"value": 1, "source": "me"},
    {"value": 1, "choice": -1},
    {"value": 1, "choice": True},
    {"value": 1, "at": "tomorrow"},
    {"value": 1, "at": 1e12},
    {"value": 1, "metric": ""},
    {"value": 1, "extra": 1},
    {"value": "x" * 5000, "kind": "comment"},
    {"value": 1, "session_id": "s"},
]


@pytest.mark.parametrize("body", BAD)
async def test_what_is_no_feedback_is_refused_and_nothing_is_stored(
    start: Start, body: dict[str, Any]
) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        _, reply, _ = await client.chat()
        status, refusal = await post(client, response_id=reply["id"], **body)
    assert (status, refusal["error"]["code"]) == (400, "invalid_request")
    assert client.rows("SELECT count(*) FROM feedback") == [(0,)]


async def test_nan_is_refused(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        _, reply, _ = await client.chat()
        raw = json.dumps({"response_id": reply["id"], "value": float("nan")})
        async with client.session.post(client.url + "/v1/feedback", data=raw) as response:
            assert response.status == 400


async def test_ids_that_were_never_given_purged_or_are_anothers_are_told_apart(
    start: Start,
) -> None:
    one, two = new_key(), new_key()
    keys = {"one": {"hash": hash_key(one)}, "two": {"hash": hash_key(two)}}
    with FaultServer() as upstream:
        client = await start(upstream, keys=keys)
        mine = {"authorization": f"Bearer {one}"}
        _, reply, _ = await client.chat(headers=mine)
        theirs = {"authorization": f"Bearer {two}"}
        found = [
            await post(client, response_id="chatcmpl-nobody", value=1, headers=mine),
            await post(client, response_id=f"chatcmpl-{client.gateway.ids.make()}", value=1,
                       headers=mine),
            await post(client, response_id=reply["id"], value=1, headers=theirs),
            await post(client, session_id="nobody", value=1, headers=mine),
            await post(client, response_id=reply["id"], value=1, headers=mine),
        ]  # fmt: skip
    assert [status for status, _ in found] == [404, 410, 404, 404, 201]


async def test_a_token_lets_a_page_rate_one_response_once_and_nothing_else(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(
            upstream, routes={"r": {"feedback_tokens": True, "learn": {"enabled": False}}}
        )
        _, reply, _ = await client.chat()
        _, other, _ = await client.chat("b")
        token = reply["tfgrpo"]["feedback_token"]
        page = {"origin": "http://shop.example"}
        async with client.session.options(client.url + "/v1/feedback", headers=page) as response:
            assert response.status == 204
            assert response.headers["access-control-allow-origin"] == "*"
        async with client.post("/v1/feedback", {"token": token, "value": 1}, **page) as response:
            assert response.status == 201
            assert response.headers["access-control-allow-origin"] == "*"
        assert (await post(client, token=token, value=1))[0] == 200
        assert (await post(client, token=token, value=0))[0] == 422
        assert (await post(client, token=token, value=0, response_id=other["id"]))[0] == 422
        assert (await post(client, token=token[:-1] + "x", value=0))[0] == 401
        body = {"response_id": other["id"], "value": 1}
        async with client.post("/v1/feedback", body, **page) as response:
            assert response.status == 401
        async with client.post("/v1/chat/completions", {}, **page) as response:
            assert response.status == 403
    assert (await shown(client, other["id"]))["data"] == []


async def test_acknowledged_feedback_is_in_the_file(start: Start, tmp_path: Path) -> None:
    import sqlite3

    with FaultServer() as upstream:
        client = await start(upstream)
        _, reply, _ = await client.chat()
        await post(client, response_id=reply["id"], value=1, comment="well put")
        other = sqlite3.connect(f"file:{client.gateway.folder / 'run.db'}?mode=ro", uri=True)
        rows = other.execute("SELECT kind, value FROM feedback ORDER BY feedback").fetchall()
        other.close()
    assert rows == [("reward", "1"), ("comment", '"well put"')]


async def test_a_journal_that_cannot_be_written_acknowledges_nothing(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        _, reply, _ = await client.chat()
        connection = client.gateway.journal.writer.connection
        connection.execute("PRAGMA query_only=1")
        status, refusal = await post(client, response_id=reply["id"], value=1)
        connection.execute("PRAGMA query_only=0")
        assert (status, refusal["error"]["code"]) == (503, "storage")
        assert (await shown(client, reply["id"]))["data"] == []


async def test_a_closed_group_takes_no_more_and_a_strict_task_no_other_messages(
    start: Start,
) -> None:
    with FaultServer() as upstream:
        client = await start(upstream, routes={"r": {"groups": {"strict": True}}})
        assert (await client.chat(tfgrpo={"group_id": "g"}))[0] == 200
        for _ in range(2):
            async with client.post("/tfgrpo/v1/groups/g/close", {}) as response:
                assert response.status == 200
        status, reply, _ = await client.chat(tfgrpo={"group_id": "g"})
        assert (status, reply["error"]["code"]) == (409, "group_closed")
        async with client.post("/tfgrpo/v1/groups/nobody/close", {}) as response:
            assert response.status == 404
        assert (await client.chat("one", tfgrpo={"task_id": "t"}))[0] == 200
        assert (await client.chat("one", tfgrpo={"task_id": "t"}))[0] == 200
        status, reply, _ = await client.chat("two", tfgrpo={"task_id": "t"})
    assert (status, reply["error"]["code"]) == (409, "task_changed")


async def test_content_is_removed_after_its_days_and_figures_stay(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream, routes={"r": {"capture": True, "keep_days": 1}})
        await client.chat("a private question")
        learning = client.running.learning
        learning.purge()
        assert client.rows("SELECT count(*) FROM choices") == [(1,)]
        client.gateway.journal.writer.connection.execute("UPDATE requests SET at = at - 90000")
        learning.purge()
    assert client.rows("SELECT prompt FROM requests") == [(None,)]
    assert client.rows("SELECT count(*) FROM choices") == [(0,)]
    assert client.rows("SELECT count(*) FROM results") == [(1,)]


async def test_the_right_answer_of_a_clients_group_is_its_tasks_reference(start: Start) -> None:
    route = {"capture": True, "groups": {"size": 2}, "learn": {"enabled": False}}
    with FaultServer() as upstream:
        client = await start(upstream, routes={"r": route})
        for value in (0.0, 1.0):
            _, reply, _ = await client.chat("why?", tfgrpo={"group_id": "g"})
            record = {"response_id": reply["id"], "value": value}
            async with client.post("/v1/feedback", record) as response:
                assert response.status == 201
        answer = {"group_id": "g", "kind": "answer", "value": "because"}
        async with client.post("/v1/feedback", answer) as response:
            assert response.status == 201
        (group,) = client.running.learning.routes["r"].traffic.groups(client.gateway.journal)
    assert group.task.reference == "because" and group.is_informative()
