"""How alike two texts are, by words, in any script; the one tokenisation of this folder.

Words are runs of letters or digits of scripts that use spaces, and single characters of scripts
that do not. Does not know meaning: a paraphrase is not found. Source: shingles and their overlap
(Broder 1997), own thresholds.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from tfgrpo.experience.patterns import STOP_WORDS

_WORD = re.compile(
    r"[\u0e00-\u0e7f\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    r"\U00020000-\U0003ffff]|[^\W_]+"
)
NEAR = 0.65
"""Share of common word pairs from which two lessons say the same."""
_NEAR_SUBSTITUTED = 0.9
_NEGATIONS = frozenset(
    ["not", "no", "never", "without", "don", "doesn", "isn", "cannot", "except", "unless"]
) | frozenset("不别勿没")


def normal(text: str) -> str:
    """Return a text without case, accent forms, punctuation and spacing, for equality.

    >>> normal("Check the  UNITS!") == normal("check the units")
    True
    """
    found = words(text)
    return " ".join(found) if found else text.strip()


def words(text: str) -> list[str]:
    """Return the words of a text, case-folded and compatibility-normalised.

    >>> words("Don't 數數")
    ['don', 't', '數', '數']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def shingles(text: str, n: int) -> set[tuple[str, ...]]:
    """Return the n-word sequences of a text; a shorter text is one shingle, an empty one none."""
    return set(ngrams(words(text), n))


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Return the n-grams of a word list, or the whole list where it is shorter."""
    if not tokens:
        return []
    if len(tokens) < n:
        return [tuple(tokens)]
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def jaccard(a: str, b: str, n: int = 2) -> float:
    """Return the share of common n-word sequences, 0 to 1; two empty texts are equal."""
    return share(shingles(a, n), shingles(b, n))


def share(left: set[tuple[str, ...]], right: set[tuple[str, ...]]) -> float:
    """Return the share of common sequences, 0 to 1, as `jaccard` does of their texts."""
    if not left and not right:
        return 1.0
    common = len(left & right)
    return common / (len(left) + len(right) - common)


def is_near(a: str, b: str, threshold: float = NEAR) -> bool:
    """True when two texts say the same but for a few words.

    Numbers must agree, neither may have a negation that the other lacks, and where both have a
    content word of their own (first, last) nearly everything else must be equal.
    """
    left, right = words(a), words(b)
    if not left or not right:
        return False
    if [w for w in left if w.isdigit()] != [w for w in right if w.isdigit()]:
        return False
    only_left, only_right = set(left) - set(right), set(right) - set(left)
    if (only_left | only_right) & _NEGATIONS:
        return False
    if only_left - STOP_WORDS and only_right - STOP_WORDS:
        threshold = max(threshold, _NEAR_SUBSTITUTED) if threshold >= NEAR else threshold
    return jaccard(a, b) >= threshold


def containment(part: str, whole: set[tuple[str, ...]], n: int) -> float:
    """Return the share of a text's n-grams that stand in `whole`, 0 to 1."""
    mine = ngrams(words(part), n)
    return sum(g in whole for g in mine) / len(mine) if mine else 0.0
