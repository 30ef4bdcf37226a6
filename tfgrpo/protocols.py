"""What a user may write: `LM`, `Policy`, `Verifier`, `Allocator`, and the seams between modules.

Each protocol states its contract in at most six lines; `tfgrpo.testing.check_*` runs a contract
against any implementation. Does not know any implementation. Idea: protocols, not base classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

from tfgrpo.context import Context
from tfgrpo.hint_plan import Ask, HintPlan, PlannedGroup
from tfgrpo.messages import Message, ToolCall
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task, Usage

__all__ = [
    "Allocator",
    "GrowingAllocator",
    "Completion",
    "Finish",
    "Generated",
    "Generator",
    "GroupPolicy",
    "HintScheduler",
    "LM",
    "Limits",
    "Policy",
    "Recorder",
    "Request",
    "Sampling",
    "ToolSpec",
    "Verifier",
]

Finish = Literal["stop", "length", "tool_calls", "content_filter"]
_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. None leaves a value to the provider."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """Limit of the reply in tokens, reasoning included."""
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    """Ask for token ids and log-probabilities of the reply where the engine can tell them."""
    top_logprobs: int = 0
    """How many alternatives a token, 0 to 20."""
    reasoning_effort: str | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    """Further provider fields, as JSON; part of every cache key."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may take. Not part of a cache key."""

    timeout_s: float = 120.0
    """Total wall time of the call."""
    first_token_s: float | None = None
    """Time to the first token of a stream; None means the total alone counts."""
    max_reply_bytes: int = 8_000_000


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a model sees it."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments object."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that a provider is asked, except how many draws and their seeds."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: str | None = None
    """`auto`, `none`, `required` or a tool's name."""
    response_format: Mapping[str, Any] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)

    def with_sampling(self, **changes: Any) -> Request:
        """Return the same request with some sampling fields changed."""
        return replace(self, sampling=replace(self.sampling, **changes))


@dataclass(frozen=True, slots=True)
class Completion:
    """One reply."""

    text: str
    finish: Finish = "stop"
    reasoning: str = ""
    """Thinking returned in a field of its own or inside think tags; never part of `text`."""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    top_logprobs: tuple[Mapping[str, float], ...] | None = None
    """Per token: alternative token text to natural-log probability."""
    usage: Usage = field(default_factory=Usage)
    """This reply's share; the replies of one call sum to the call's usage, `calls` included."""
    model: str = ""
    """The model's name as the server reported it."""

    @property
    def message(self) -> Message:
        """The reply as an assistant turn."""
        return Message("assistant", self.text, self.tool_calls, reasoning=self.reasoning)


class LM(Protocol):
    """Something that writes text.

    Contract:
        1. `complete` returns 1 to n completions in draw order; fewer than n is a short answer that
           the caller re-asks, never an error.
        2. `seeds` has n entries; equal request and seed give an equal reply where the engine can.
        3. A failure raises `ProviderError` with its kind; nothing else leaves, no retry is made.
        4. A reply cut at the token limit has finish `length`; thinking never stands in `text`.
        5. Safe to call from many asyncio tasks at once; cancelling a call frees what it held.
        6. `identity` is JSON and changes whenever the same request could be answered otherwise
           (backend, model, base URL, credential identity as a hash; never a secret).
    """

    @property
    def model_id(self) -> str:
        """The spec string, without secrets; stands in ledgers and reports."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """Where a request goes, for cache keys."""
        ...

    @property
    def prefers_n(self) -> bool:
        """True when one call for n draws is cheaper than n calls."""
        ...

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return 1 to n replies to `request`."""
        ...

    async def aclose(self) -> None:
        """Free connections, processes and memory; may be called twice."""
        ...


class LMWrapper:
    """Base of an LM around another one: what it does not change is the wrapped LM's."""

    def __init__(self, lm: LM) -> None:
        self._lm = lm

    @property
    def model_id(self) -> str:
        """The wrapped LM's."""
        return self._lm.model_id

    @property
    def identity(self) -> Mapping[str, Any]:
        """The wrapped LM's: wrapping changes no answer."""
        return self._lm.identity

    @property
    def prefers_n(self) -> bool:
        """The wrapped LM's."""
        return self._lm.prefers_n

    @property
    def price(self) -> Any:
        """What the wrapped LM says that its tokens cost; None where it does not say it."""
        return getattr(self._lm, "price", None)

    async def aclose(self) -> None:
        """Close the wrapped LM."""
        await self._lm.aclose()


@runtime_checkable
class Policy(Protocol):
    """Something that acts.

    Contract:
        1. `attempt` never raises for a failed attempt: it returns a rollout whose outcome says how.
        2. It never uses `task.reference` or `task.metadata`, and never scores itself: a finished
           attempt is `ungraded`; where a reply hit its token limit `is_truncated` is set.
        3. Cancellation passes through and leaves nothing running.
        4. Safe to call from many asyncio tasks at once.
    """

    @property
    def policy_id(self) -> str:
        """Changes whenever the policy could act otherwise (model, sampling, tools, system text)."""
        ...

    async def attempt(self, task: Task, context: Context, seed: int) -> Rollout:
        """Return one attempt at the task."""
        ...


@runtime_checkable
class GroupPolicy(Policy, Protocol):
    """A policy that can make several draws of one task in fewer calls."""

    async def attempt_group(
        self, task: Task, context: Context, seeds: Sequence[int]
    ) -> list[Rollout]:
        """Return one attempt a seed, in order; same contract as `attempt`."""
        ...


class Verifier(Protocol):
    """Something that judges.

    Contract:
        1. `score` returns a `Score` with a finite reward or raises; it never guesses a 0.
        2. It does not change the rollout or the task.
        3. Equal rollout and task give an equal score, unless it asks an LM.
        4. `check_task` raises `ConfigError` for a reference it could never judge, before spending.
    """

    @property
    def verifier_id(self) -> str:
        """Changes whenever the verifier could judge otherwise."""
        ...

    @property
    def reward_range(self) -> tuple[float, float]:
        """Smallest and largest reward; infinities where there is no bound."""
        ...

    def check_task(self, task: Task) -> None:
        """Raise `ConfigError` when the task's reference cannot be judged."""
        ...

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Return reward, feedback and components."""
        ...


@runtime_checkable
class GroupVerifier(Verifier, Protocol):
    """A verifier whose scores of a group's rollouts depend on each other, such as a tournament.

    Contract: as `Verifier`; `score_group` returns one score per rollout, in order, and `score`
    judges a rollout alone.
    """

    async def score_group(self, rollouts: Sequence[Rollout], task: Task) -> list[Score]:
        """Return a score for each rollout of one task."""
        ...


class Allocator(Protocol):
    """How many rollouts each task gets: any callable of this shape.

    Contract: one non-negative integer a task in order, summing to at most `budget`; no side effect.
    """

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return the number of rollouts of each task."""
        ...


@runtime_checkable
class GrowingAllocator(Allocator, Protocol):
    """An allocator that looks at a step's first rollouts before it spends the rest.

    Contract: as `Allocator`; `grow` returns sizes in all, one a task in order, none below `sizes`,
    at most `budget` together. Equal sizes end the step.
    """

    def grow(
        self,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        groups: Sequence[RolloutGroup],
        sizes: Sequence[int],
        budget: int,
    ) -> list[int]:
        """Return the sizes after seeing `groups`, those of the tasks that have rollouts."""
        ...


class Recorder(Protocol):
    """Where finished work is kept and found again, so that it is never paid twice."""

    def find_rollout(self, rollout_id: str, verifier_id: str) -> Rollout | None:
        """Return a finished rollout as it was graded by that verifier, if there is one."""
        ...

    def record_rollout(self, rollout: Rollout, *, group_id: str, verifier_id: str) -> None:
        """Keep a finished rollout."""
        ...

    def record_group(self, group: RolloutGroup) -> None:
        """Keep a closed group (its rollouts are already kept)."""
        ...


@runtime_checkable
class SharedRecorder(Recorder, Protocol):
    """A recorder that several processes may use at once, each making some of the groups."""

    def lease_group(self, group_id: str, verifier_id: str) -> bool:
        """Return True where this process is the one to make a group; False while another that
        lives makes it. Asking again is free."""
        ...


@dataclass(frozen=True, slots=True)
class Generated:
    """One continuation made in-process."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural-log probability of each token under the drawing distribution's raw softmax
    (temperature 1, no truncation), the convention trainers compare with."""
    finish: Literal["stop", "length", "partial"]
    """`partial`: ended by whoever asked, before its end or its limit."""


class Generator(Protocol):
    """What makes tokens in-process, sharing a trainer's weights.

    Contract:
        1. `generate` takes P prompts of token ids and returns P lists of n continuations each.
        2. A row's tokens depend on its prompt, params and seed alone, never on its batch.
        3. `sync` makes the given named tensors the weights that the next `generate` uses.
    """

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Generated]]:
        """Return n continuations a prompt."""
        ...

    def sync(self, named_params: Mapping[str, Any]) -> None:
        """Take new weights."""
        ...


class HintScheduler(Protocol):
    """When a task gets which hint. Plans carry text; whoever rolls them turns text into tokens.

    Contract of a visit: `start` names the plans that are rolled at once (`BARE` is the task alone).
    When they are graded, `after` sees all that was made in this visit, in the order asked for, and
    names further plans or texts to write, or none when it is enough. `accept`, called once, gives
    the group to train on, merged where the method mixes; it may come early, where a hinted prompt
    was longer than the model's context. Only `accept` and `epoch_end` change the state, as JSON.
    A scheduler may also have `beside(task, made)`, called before `accept`: further groups to train
    on, each with a baseline of its own, which count in no figure of the step's rewards.
    """

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the first plans of this visit, at least one."""
        ...

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[Ask]:
        """Return further plans and texts to write; empty for enough."""
        ...

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return the group to train on."""
        ...

    def epoch_end(self) -> None:
        """Update per-task state after an epoch."""
        ...

    def figures(self) -> dict[str, float]:
        """Return what the log shows of the run so far."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state.

        Raises:
            StoreError: the state is another scheduler's.
        """
        ...
