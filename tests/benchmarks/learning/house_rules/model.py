"""The two simulators as one LM with an account, in this process or behind HTTP.

Tokens are a quarter of the characters, rounded up; every draw counts its prompt, in this process
as at the server, so that all methods pay alike. Does not know methods or rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.benchmarks.learning.house_rules import critic_simulator, policy_simulator
from tests.benchmarks.learning.house_rules.language.cases import Message
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Usage

Role = Literal["policy", "critic"]


def tokens(text: str) -> int:
    """Return the tokens of a text, a quarter of its characters.

    >>> tokens("abcde")
    2
    """
    return -(-len(text) // 4)


@dataclass
class Account:
    """What one learner has asked for."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    """By role: a policy's call is a rollout."""
    asked: Counter[Any] = field(default_factory=Counter)
    """How often each prompt came without a seed: its draws must differ."""

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


def ask(
    role: str, messages: Sequence[Message], seed: int | None, noise: float, account: Account
) -> tuple[str, int, int]:
    """Return a simulator's reply with its prompt and completion tokens, and count them."""
    if seed is None:
        asked = (role, tuple(messages))
        seed = account.asked[asked]
        account.asked[asked] += 1
    if role == "critic":
        text = critic_simulator.reply(messages)
    else:
        text = policy_simulator.reply(messages, seed, noise)
    sent = sum(tokens(content) for _, content in messages)
    account.prompt_tokens += sent
    account.completion_tokens += tokens(text)
    account.calls[role] += 1
    return text, sent, tokens(text)


class SimulatedLM:
    """A simulator as `tfgrpo.protocols.LM`."""

    def __init__(self, role: Role, noise: float, account: Account) -> None:
        self._role: Role = role
        self._noise = noise
        self.account = account

    @property
    def model_id(self) -> str:
        """The role."""
        return f"scripted:{self._role}"

    @property
    def identity(self) -> Mapping[str, Any]:
        """Role and noise."""
        return {"backend": "house_rules", "role": self._role, "noise": self._noise}

    @property
    def prefers_n(self) -> bool:
        """False: each draw is a call, as at the server."""
        return False

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Ask the simulator once a draw."""
        messages = [(m.role, m.content) for m in request.messages]
        found = []
        for seed in list(seeds)[:n]:
            text, sent, made = ask(self._role, messages, seed, self._noise, self.account)
            usage = Usage(uncached_tokens=sent, text_tokens=made, calls=1)
            found.append(Completion(text, usage=usage, model=self.model_id))
        return found

    async def aclose(self) -> None:
        """Nothing to free."""
