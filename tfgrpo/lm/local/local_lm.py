"""Transformers weights in this process, requests of many asyncio tasks decoded together.

Requests queue; one engine thread decodes them as rows of one batch, and rows join and leave while
it runs. A prompt that several rows share is read once. Equal request and seed give an equal reply
whatever else is in the batch, as far as the engine's arithmetic allows: each row draws from its
own random stream, but in bfloat16 the shape of a batch can change a logit's last bit.

Does not know HTTP, caches, retries. Idea: one model, one queue (own).
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfgrpo.errors import ConfigError, ProviderError, TfgrpoError
from tfgrpo.lm.local.chat_template import ChatFormat
from tfgrpo.lm.local.decode_loop import HFGenerator
from tfgrpo.lm.local.embedded import NAME as EMBEDDED
from tfgrpo.lm.local.free_cores import FreeCores
from tfgrpo.lm.local.loading import LocalModel, folder_mark, load_model, model_place
from tfgrpo.lm.local.request_queue import Job, JobQueue, JobSource, halt, run_batch
from tfgrpo.lm.local.rows import DecodeRow, RowServer
from tfgrpo.lm.wire import timed_out
from tfgrpo.protocols import Completion, Finish, Generated, Generator, Request
from tfgrpo.rollout import Usage
from tfgrpo.runtime.thinking import split_thinking

_JOIN_S = 0.003
"""How long an idle engine waits for requests that are made at the same moment."""


def make_generator(
    loaded: LocalModel, *, max_rows: int = 64, threads: Callable[[], int] | None = None
) -> Generator:
    """Return what decodes: on a GPU the graph-replaying decoder of `rl.generation` where it is
    installed, else the loop of `decode_loop`, which is as fast on a CPU. Both take rows in while
    others decode and hand every reply over as it ends. `threads` is for the latter."""
    if loaded.model.device.type == "cuda":
        make = _faster_generator()
        made = make(loaded.model, loaded.tokenizer, max_rows=max_rows) if make else None
        if made is not None:
            return made
    return HFGenerator(
        loaded.model,
        eos_ids=loaded.eos_ids,
        decode=loaded.tokenizer.decode,
        max_rows=max_rows,
        threads=threads if loaded.model.device.type == "cpu" else None,
    )


def _faster_generator() -> Callable[..., Generator | None] | None:
    """The one place of the core that knows `rl`: its decoder, where that module is installed."""
    try:
        from tfgrpo.rl.generation.generator import make_generator as make
    except ImportError:
        return None
    return make


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights that somebody else loaded, such as a trainer."""

    model: LocalModel
    generator: Generator | None = None
    """What decodes; None asks `make_generator`."""
    weights_id: str = ""
    """Part of the identity; another one when the weights were changed in place."""


class LocalLM:
    """A model in this process.

    Args:
        name: `smollm2-135m`, a folder with `config.json`, or `ORG/NAME` of the hub.
        device: None takes a GPU where there is one.
        dtype: None is bfloat16 where the device multiplies it natively, else float32.
        max_rows: rows decoded at once.
        max_tokens: of a reply whose request sets none.
        threads: of torch; None takes, from step to step, the cores that others leave free.
        loaded: weights that somebody else loaded; then `name` is only a label.
    """

    def __init__(
        self,
        name: str,
        *,
        device: str | None = None,
        dtype: str | None = None,
        max_rows: int = 64,
        max_tokens: int = 512,
        threads: int | None = None,
        loaded: LoadedWeights | None = None,
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"local model {name!r}: max_rows {max_rows} must be 1 or more")
        if name != EMBEDDED and loaded is None:
            model_place(name)  # a wrong name is told now, not at the first call
        self._name = name
        self._load: Callable[[], LocalModel] = lambda: load_model(
            name, device=device, dtype=dtype, threads=threads
        )
        self._dtype_asked = dtype
        self._threads = FreeCores().count if threads is None and loaded is None else None
        self._max_rows = max_rows
        self._default_tokens = max_tokens
        self._loaded = loaded.model if loaded else None
        self._generator = loaded.generator if loaded else None
        self._format: ChatFormat | None = None
        self._weights_id = loaded.weights_id if loaded else ""
        self._queue = JobQueue()
        weakref.finalize(self, halt, self._queue)
        self._load_lock = threading.Lock()

    @property
    def model_id(self) -> str:
        """The spec string."""
        return f"local:{self._name}"

    @property
    def identity(self) -> Mapping[str, Any]:
        """Backend, name, number type, default reply length and the weights' label."""
        return {
            "backend": "local",
            "model": self._name,
            "dtype": self._dtype_asked or "auto",
            "max_tokens": self._default_tokens,
            "weights": self._weights_id,
            "files": folder_mark(self._name),
        }

    @property
    def prefers_n(self) -> bool:
        """True: the prompt of n draws is read once."""
        return True

    @property
    def loaded(self) -> LocalModel:
        """The weights; loads them if no call has."""
        self._prepare()
        assert self._loaded is not None
        return self._loaded

    @property
    def generator(self) -> Generator:
        """What decodes; shared with a trainer, whose `sync` gives it new weights."""
        self._prepare()
        assert self._generator is not None
        return self._generator

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return n replies, decoded together with whatever else waits."""
        chat = await self._chat()
        prompt = self._read(chat, request)
        jobs = self._enqueue(request, prompt, list(seeds)[:n])
        where = f"model {self.model_id!r}"
        failure: ProviderError | None = None
        try:
            async with asyncio.timeout(request.limits.timeout_s):
                results = await asyncio.gather(*(j.future for j in jobs))
        except TimeoutError:
            failure = timed_out(where, "no whole reply", "timeout_s", request.limits.timeout_s)
        finally:
            for job in jobs:
                job.row.is_cancelled = True
        if failure is not None:
            raise failure
        return [
            self._completion(chat, request, prompt, job, result, is_first=i == 0)
            for i, (job, result) in enumerate(zip(jobs, results, strict=True))
        ]

    async def stream(self, request: Request, seed: int | None) -> AsyncIterator[str | Completion]:
        """Yield the pieces of one reply's text as they are decoded, then the `Completion`.

        Pieces are raw text, thinking and tool calls included; only the completion separates them.
        """
        chat = await self._chat()
        prompt = self._read(chat, request)
        pieces: asyncio.Queue[int | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def heard(row: DecodeRow) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, len(row.token_ids))

        (job,) = self._enqueue(request, prompt, [seed], on_token=heard)
        job.future.add_done_callback(lambda _: pieces.put_nowait(None))
        sent = ""
        try:
            async with asyncio.timeout(request.limits.timeout_s):
                while (count := await pieces.get()) is not None:
                    text = chat.text(job.row.token_ids[:count])
                    # A cut character, or what may grow into a stop string, waits for its rest.
                    text = chat.safe_prefix(text, request.sampling.stop)
                    if text.startswith(sent) and text != sent:
                        yield text[len(sent) :]
                        sent = text
                completion = self._completion(
                    chat, request, prompt, job, await job.future, is_first=True
                )
            whole, _ = chat.cut(job.row.token_ids, request.sampling.stop)
            if whole.startswith(sent) and whole != sent:
                yield whole[len(sent) :]
            yield completion
        finally:
            job.row.is_cancelled = True

    def token_text(self, token_id: int) -> str:
        """Return the text of one token of a reply."""
        return "" if self._format is None else self._format.token_text(token_id)

    async def _chat(self) -> ChatFormat:
        if self._queue.is_closed:
            raise ProviderError(f"model {self.model_id!r} is closed", kind="bad_request")
        if self._format is None:
            await asyncio.to_thread(self._prepare)
        assert self._format is not None
        return self._format

    def _prepare(self) -> None:
        with self._load_lock:
            if self._format is not None:
                return
            if self._loaded is None:
                self._loaded = self._load()
            if self._generator is None:
                self._generator = make_generator(
                    self._loaded, max_rows=self._max_rows, threads=self._threads
                )
            self._format = ChatFormat(self._loaded.tokenizer, self._loaded.eos_ids)

    def _read(self, chat: ChatFormat, request: Request) -> tuple[int, ...]:
        """The prompt's token ids; raises where it leaves no room for a reply."""
        prompt = chat.prompt_ids(request)
        assert self._loaded is not None
        limit = self._loaded.context_tokens
        wanted = request.sampling.max_tokens or 1
        if len(prompt) + wanted > limit:
            raise ProviderError(
                f"model {self.model_id!r}: the prompt has {len(prompt)} tokens and max_tokens is "
                f"{wanted}, the context holds {limit}; shorten one of them",
                kind="context_too_long",
            )
        return prompt

    def _enqueue(
        self,
        request: Request,
        prompt: tuple[int, ...],
        seeds: Sequence[int | None],
        on_token: Callable[[DecodeRow], None] | None = None,
    ) -> list[Job]:
        assert self._loaded is not None
        room = self._loaded.context_tokens - len(prompt)
        limit = min(request.sampling.max_tokens or self._default_tokens, room)
        sampling = replace(request.sampling, max_tokens=limit)
        loop = asyncio.get_running_loop()
        jobs = [
            Job(
                DecodeRow(
                    prompt,
                    secrets.randbits(63) if seed is None else seed,
                    sampling,
                    limit,
                    on_token=on_token,
                ),
                loop,
                loop.create_future(),
            )
            for seed in seeds
        ]
        for job in jobs:
            job.row.tag = job
        with self._queue.lock:
            if self._queue.is_closed:
                raise ProviderError(f"model {self.model_id!r} is closed", kind="bad_request")
            self._queue.jobs.extend(jobs)
            if self._queue.thread is None:
                self._queue.thread = threading.Thread(
                    target=self._decode, name="tfgrpo-local-lm", daemon=True
                )
                self._queue.thread.start()
        return jobs

    def _decode(self) -> None:
        """The engine thread: decode until nothing waits."""
        time.sleep(_JOIN_S)
        while True:
            with self._queue.lock:
                if not self._queue.jobs:
                    self._queue.thread = None
                    return
            source = JobSource(self._queue)
            generator = self._generator
            assert generator is not None
            try:
                if isinstance(generator, RowServer):
                    generator.serve(source)
                else:
                    run_batch(generator, source, self._max_rows)
            except TfgrpoError as exc:
                source.fail(exc)
            except (ArithmeticError, RuntimeError, ValueError, MemoryError) as exc:
                # torch raises RuntimeError for everything, exhausted memory included.
                source.fail(
                    ProviderError(
                        f"model {self.model_id!r}: {type(exc).__name__}: {exc!s:.300}",
                        kind="bad_reply",
                    )
                )

    def _completion(
        self,
        chat: ChatFormat,
        request: Request,
        prompt: tuple[int, ...],
        job: Job,
        made: Generated,
        *,
        is_first: bool,
    ) -> Completion:
        text, ids = chat.cut(made.token_ids, request.sampling.stop)
        was_cut = len(ids) == len(made.token_ids) and made.finish != "stop"
        finish: Finish = "length" if was_cut else "stop"
        tools: tuple[Any, ...] = ()
        answer, thought = split_thinking(text)
        if request.tools and request.tool_choice != "none":
            answer, tools = chat.tool_calls(answer)
        if tools and finish == "stop":
            finish = "tool_calls"
        reasoning_tokens = min(len(ids), chat.count(thought)) if thought else 0
        usage = Usage(
            uncached_tokens=len(prompt) if is_first else 0,
            text_tokens=len(made.token_ids) - reasoning_tokens,
            reasoning_tokens=reasoning_tokens,
            calls=1 if is_first else 0,
        )
        wants = request.sampling.logprobs or request.sampling.top_logprobs
        top = tuple(
            {chat.token_text(i): logp for i, logp in row.items()} for row in job.row.top[: len(ids)]
        )
        return Completion(
            answer,
            finish,
            thought,
            tools,
            token_ids=ids,
            logprobs=made.logprobs[: len(ids)] if wants else None,
            prompt_token_ids=prompt,
            top_logprobs=top or None,
            usage=usage,
            model=self._name,
        )

    async def aclose(self) -> None:
        """Refuse further calls, cancel waiting ones and let the weights go."""
        jobs, thread = self._queue.close()
        for job in jobs:
            job.settle(ProviderError(f"model {self.model_id!r} was closed", kind="bad_request"))
        if thread is not None:
            await asyncio.to_thread(thread.join)
        self._loaded = self._generator = self._format = None
