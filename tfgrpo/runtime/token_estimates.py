"""How many tokens a text may have, where no tokenizer is at hand. Source: own measurements."""

from __future__ import annotations

import math

_PLAIN = [bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \n"]


def estimate_tokens(text: str) -> int:
    """Return a cautious token count for a model whose tokenizer is not at hand.

    Letters and spaces count a third each, other ASCII one each, other characters 3/4 of their
    UTF-8 bytes: more than common byte-pair tokenizers give on prose, code and Chinese
    (approximation).
    """
    ascii_text = text.encode("ascii", "ignore")
    plain = sum(map(ascii_text.count, _PLAIN))
    wide_bytes = len(text.encode("utf-8", "surrogatepass")) - len(ascii_text)
    return math.ceil(plain / 3 + (len(ascii_text) - plain) * 0.9 + wide_bytes * 0.75)


def quarter_of(utf8_bytes: int) -> int:
    """Return about how many tokens so many bytes of text are: four bytes each (approximation)."""
    return math.ceil(utf8_bytes / 4)
