import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tfgrpo.lm.stream import EventStream

BODY = (
    b"\xef\xbb\xbf: a comment\r\n"
    + 'data: {"t": "39 – ü 🙂"}\r\n\r\n'.encode()
    + b'event: x\ndata: {"a":\ndata:  1}\nid: 3\n\n'
    + b'retry: 5\rdata:{"b": 2}\r\r'
    + b"data\n\ndata: [DONE]\n\n"
)


def read(pieces: list[bytes]) -> list[str]:
    stream = EventStream()
    events = [e for p in pieces for e in stream.feed(p)]
    return events + stream.close()


EXPECTED = ['{"t": "39 – ü 🙂"}', '{"a":\n 1}', '{"b": 2}', "", "[DONE]"]


def test_the_body_in_one_piece_gives_the_events():
    assert read([BODY]) == EXPECTED
    assert json.loads(EXPECTED[1]) == {"a": 1}


def test_every_single_split_point_gives_the_same_events():
    for i in range(len(BODY) + 1):
        assert read([BODY[:i], BODY[i:]]) == EXPECTED, i


def test_every_byte_alone_gives_the_same_events():
    assert read([BODY[i : i + 1] for i in range(len(BODY))]) == EXPECTED


@settings(max_examples=200)
@given(st.lists(st.integers(0, len(BODY)), max_size=12))
def test_any_splits_give_the_same_events(cuts):
    marks = sorted({0, *cuts, len(BODY)})
    assert read([BODY[a:b] for a, b in pairwise(marks)]) == EXPECTED


def test_an_event_without_its_last_empty_line_still_counts():
    assert read([b"data: 1\n\ndata: 2"]) == ["1", "2"]


def test_a_long_line_is_held_once_and_counted():
    stream = EventStream()
    for _ in range(1000):
        assert stream.feed(b"x" * 1000) == []
    assert stream.pending_bytes == 1_000_000
