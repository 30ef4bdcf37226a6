"""Worst cases that grow with what calls have used beyond their estimates.

A prompt is estimated by its bytes. What a server puts around it is a number of tokens, whatever its
length, and is learnt from short prompts; how many tokens a text of its kind has is a factor, and is
learnt from long ones. A limit on the reply that a server does not keep is a factor too. So one
short prompt with much around it makes no long prompt look dear.

Does not know money or journals. Source: own, after `tfgrpo.store.booking.LearntBound`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfgrpo.rollout import Usage

__all__ = ["Beyond"]

LONG_TOKENS = 500
"""Estimate from which a prompt is a long one."""


@dataclass(slots=True)
class Beyond:
    """What one model's calls have used beyond their estimates.

    >>> beyond = Beyond()
    >>> beyond.observe((20, 50), Usage(uncached_tokens=400, text_tokens=40))
    True
    >>> beyond.widen(20, 50), beyond.widen(10_000, 50)
    ((400, 50), (10380, 50))
    """

    around: int = 0
    """Tokens that stand around a prompt."""
    factor: float = 1.0
    """Tokens of a long prompt for each that was estimated."""
    reply: float = 1.0
    """Tokens of a reply for each that its limit allows."""

    def widen(self, prompt_tokens: int, completion_tokens: int) -> tuple[int, int]:
        """Return estimates as large as calls like it have been."""
        prompt = max(prompt_tokens + self.around, math.ceil(prompt_tokens * self.factor))
        return prompt, math.ceil(completion_tokens * self.reply)

    def observe(self, estimate: tuple[int, int], usage: Usage) -> bool:
        """Take what a call with an (unwidened) estimate used; True where something grew."""
        prompt, completion = estimate
        before = (self.around, self.factor, self.reply)
        if prompt >= LONG_TOKENS:
            self.factor = max(self.factor, usage.prompt_tokens / prompt)
        else:
            self.around = max(self.around, usage.prompt_tokens - prompt)
        if completion:
            self.reply = max(self.reply, usage.completion_tokens / completion)
        return before != (self.around, self.factor, self.reply)
