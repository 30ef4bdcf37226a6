"""vLLM in this process: weights on this machine, no server.

Requests of one event loop go to vLLM's asynchronous engine, which batches them itself. Does not
know HTTP. Source: vLLM's `AsyncLLM` interface.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import MissingExtraError, ProviderError
from tfgrpo.lm.finish_words import finish_of
from tfgrpo.lm.local.chat_template import TEMPLATE_OPTIONS, ChatFormat
from tfgrpo.lm.local.embedded import NAME as EMBEDDED
from tfgrpo.lm.local.embedded import embedded_folder
from tfgrpo.lm.wire import timed_out
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Usage
from tfgrpo.runtime.redaction import redact
from tfgrpo.runtime.thinking import split_thinking


class VllmLM:
    """A model on vLLM's engine in this process; loaded at the first call.

    Args:
        model: a folder, a name on the hub, or `smollm2-135m`.
        max_tokens: of a reply whose request sets none.
        engine: further arguments of vLLM's `AsyncEngineArgs` (`max_model_len`, `dtype`, …).
    """

    def __init__(
        self, model: str, *, max_tokens: int = 512, engine: Mapping[str, Any] | None = None
    ) -> None:
        self._model = model
        self._default_tokens = max_tokens
        self._engine_args = dict(engine or {})
        self._engine: Any = None
        self._chat: ChatFormat | None = None
        self._context = 0
        self._lock = asyncio.Lock()

    @property
    def model_id(self) -> str:
        """The spec string."""
        return f"vllm:{self._model}"

    @property
    def identity(self) -> Mapping[str, Any]:
        """Backend, model, engine arguments and default reply length."""
        return {
            "backend": "vllm",
            "model": self._model,
            "engine": {k: str(v) for k, v in self._engine_args.items()},
            "max_tokens": self._default_tokens,
        }

    @property
    def prefers_n(self) -> bool:
        """False: the engine shares equal prompts by itself, and each draw keeps its own seed."""
        return False

    async def _ready(self) -> ChatFormat:
        async with self._lock:
            if self._chat is None:
                await self._start()
        assert self._chat is not None
        return self._chat

    async def _start(self) -> None:
        # vLLM logs to standard output by default, where commands print their records.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as exc:
            raise MissingExtraError.of("vllm", "the vllm backend", exc.name or "vllm") from exc
        from transformers import AutoTokenizer

        place = str(embedded_folder()) if self._model == EMBEDDED else self._model
        try:
            args = AsyncEngineArgs(model=place, **self._engine_args)
            self._engine = AsyncLLM.from_engine_args(args)
            tokenizer = AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError, RuntimeError, TypeError) as exc:
            raise ProviderError(
                redact(
                    f"model {self.model_id!r} does not start: {type(exc).__name__}: {exc!s:.300}"
                ),
                kind="not_found",
            ) from exc
        self._context = int(self._engine.model_config.max_model_len)
        self._chat = ChatFormat(tokenizer, ())

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return n replies, each drawn with its own seed."""
        chat = await self._ready()
        extra = {k: v for k, v in request.sampling.extra.items() if k in TEMPLATE_OPTIONS}
        prompt = chat.prompt_ids(request.with_sampling(extra=extra))
        wanted = request.sampling.max_tokens or 1
        if len(prompt) + wanted > self._context:
            raise ProviderError(
                f"model {self.model_id!r}: {len(prompt)} prompt tokens and max_tokens {wanted} "
                f"pass the context of {self._context}; shorten one of them",
                kind="context_too_long",
            )
        failure: ProviderError | None = None
        try:
            async with asyncio.timeout(request.limits.timeout_s):
                draws = await self._draws(request, prompt, list(seeds)[:n])
        except TimeoutError:
            where = f"model {self.model_id!r}"
            failure = timed_out(where, "no whole reply", "timeout_s", request.limits.timeout_s)
        except (RuntimeError, ValueError) as exc:
            failure = ProviderError(
                redact(f"model {self.model_id!r}: {type(exc).__name__}: {exc!s:.300}"),
                kind="bad_reply",
            )
        if failure is not None:
            raise failure
        kept = _finished(draws, f"model {self.model_id!r}")
        return [
            self._completion(chat, request, prompt, made, is_first=i == 0)
            for i, made in enumerate(kept)
        ]

    async def _draws(
        self, request: Request, prompt: tuple[int, ...], seeds: Sequence[int | None]
    ) -> list[Any]:
        tasks = [asyncio.ensure_future(self._draw(request, prompt, seed)) for seed in seeds]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _draw(self, request: Request, prompt: tuple[int, ...], seed: int | None) -> Any:
        from vllm import SamplingParams

        sampling = request.sampling
        room = self._context - len(prompt)
        params = SamplingParams(
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            max_tokens=min(sampling.max_tokens or self._default_tokens, room),
            stop=list(sampling.stop) or None,
            seed=seed,
            logprobs=sampling.top_logprobs if sampling.logprobs or sampling.top_logprobs else None,
            **{k: v for k, v in sampling.extra.items() if k not in TEMPLATE_OPTIONS},
        )
        final = None
        stream = self._engine.generate(
            {"prompt_token_ids": list(prompt)}, params, request_id=uuid.uuid4().hex
        )
        async for output in stream:  # leaving early aborts the request in the engine
            final = output
        if final is None or not final.outputs:
            raise RuntimeError("the engine gave no output")
        return final

    def _completion(
        self,
        chat: ChatFormat,
        request: Request,
        prompt: tuple[int, ...],
        made: Any,
        *,
        is_first: bool,
    ) -> Completion:
        out = made.outputs[0]
        ids = tuple(out.token_ids)
        finish = finish_of(out.finish_reason)
        answer, thought = split_thinking(out.text)
        tools: tuple[Any, ...] = ()
        if request.tools and request.tool_choice != "none":
            answer, tools = chat.tool_calls(answer)
        logprobs = None
        if out.logprobs:
            logprobs = tuple(row[i].logprob for i, row in zip(ids, out.logprobs, strict=True))
        reasoning = min(len(ids), chat.count(thought)) if thought else 0
        return Completion(
            answer,
            "tool_calls" if tools and finish == "stop" else finish,
            thought,
            tools,
            token_ids=ids,
            logprobs=logprobs,
            prompt_token_ids=prompt,
            usage=Usage(
                uncached_tokens=len(prompt) if is_first else 0,
                text_tokens=len(ids) - reasoning,
                reasoning_tokens=reasoning,
                calls=1 if is_first else 0,
            ),
            model=self._model,
        )

    async def aclose(self) -> None:
        """Stop the engine and its worker processes."""
        engine, self._engine, self._chat = self._engine, None, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)


def _finished(draws: Sequence[Any], where: str) -> list[Any]:
    """Return the draws that came to an end; what the engine gave up is no reply.

    Raises:
        ProviderError: none did.
    """
    kept, failure = [], None
    for made in draws:
        try:
            finish_of(made.outputs[0].finish_reason)
        except ProviderError as exc:
            failure = exc
        else:
            kept.append(made)
    if not kept and failure is not None:
        raise ProviderError(f"{where}: {failure}", kind=failure.kind, had_output=True) from None
    return kept
