"""Stored values: what was written once is read for ever, and small values stay text."""

import json
import zlib

import pytest

from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, Score, Step, Usage
from tfgrpo.store.codec import COMPRESS_ABOVE, DamagedValue, pack, pack_text, unpack

REPLY = (
    "First I add the two prices, 14.20 and 3.80, which makes 18.00 in all. A tenth off leaves "
    "16.20; the voucher takes another 5.00, so 11.20 are to be paid at the till. The delivery "
    "costs nothing above 10.00, as the second rule says, and there is no tax on bread."
)

WRITTEN = "787dabe6e7dc43311de10613233d858a51301a023408012c6918961a73956a012cdf2b11"
"""A reply as a journal keeps it."""


def rollout(reply: str) -> Rollout:
    """Return a graded rollout with one step."""
    return Rollout(
        "gfe1f5c157e059211cbc0-1",
        "t1156",
        steps=(Step(Message("assistant", reply)),),
        usage=Usage(uncached_tokens=140, text_tokens=100, calls=1),
        outcome="graded",
        sample_index=1,
        score=Score(0.0, "the number is 11.2, expected 12"),
        seed=480977170,
        duration_s=0.043591368,
    )


def test_a_rollout_with_a_reply_of_one_paragraph_is_halved() -> None:
    row = rollout(REPLY).to_dict()
    plain = json.dumps(row, separators=(",", ":"))
    body, mark = pack(row)
    assert isinstance(body, bytes)
    assert len(plain) > COMPRESS_ABOVE
    assert len(body) < len(plain) / 2
    assert unpack(body, mark) == row


def test_a_value_that_was_written_with_the_dictionary_is_read() -> None:
    # Bytes of a file, not of this code: they cannot be read once the dictionary has changed.
    written = bytes.fromhex(WRITTEN)
    row = {"text": "The answer is 42. " + "x" * 600, "finish": "stop", "model": "m"}
    _, mark = pack(row)
    assert unpack(written, mark) == row


@pytest.mark.parametrize("level", [1, 6, 9])
def test_a_value_that_was_written_without_the_dictionary_is_read(level: int) -> None:
    text = json.dumps(rollout(REPLY * 20).to_dict(), separators=(",", ":"))
    _, mark = pack_text(text)
    assert unpack(zlib.compress(text.encode("ascii"), level), mark) == json.loads(text)


@pytest.mark.parametrize("size", [COMPRESS_ABOVE - 2, COMPRESS_ABOVE - 1])
def test_what_is_compressed_is_what_is_above_the_limit(size: int) -> None:
    body, mark = pack("x" * size)  # two quotes are added
    assert isinstance(body, bytes) == (size + 2 > COMPRESS_ABOVE)
    assert unpack(body, mark) == "x" * size


def test_a_value_with_another_dictionary_is_damaged_and_told_so() -> None:
    text = json.dumps(REPLY * 3)
    packer = zlib.compressobj(zdict=b"another dictionary")
    body = packer.compress(text.encode("ascii")) + packer.flush()
    with pytest.raises(DamagedValue, match="cannot be unpacked"):
        unpack(body, pack_text(text)[1])
