"""vLLM in this process behind `protocols.Generator`; for a server see `vllm_server`.

Does not know rewards or training. Source: vLLM's `LLM` interface.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import MissingExtraError
from tfgrpo.protocols import Generated, Sampling


class VllmColocated:
    """A vLLM engine in this process; asleep (level 1) while the trainer works.

    Args:
        path: model folder the engine starts from.
        options: further arguments of `vllm.LLM`.
    """

    def __init__(self, path: str, **options: Any) -> None:
        # weights are handed over as objects, so the engine's core must live in this very process
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            import vllm
        except ImportError as exc:
            raise MissingExtraError.of("vllm", "the vLLM engine", "vllm") from exc
        self._vllm = vllm
        self._llm = vllm.LLM(path, enable_sleep_mode=True, **options)

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Generated]]:
        """Return n continuations a prompt; each draw is a request with its own seed."""
        del n
        prompts, params = [], []
        for ids, row in zip(token_ids, seeds, strict=True):
            for seed in row:
                prompts.append({"prompt_token_ids": list(ids)})
                params.append(
                    self._vllm.SamplingParams(
                        temperature=1.0 if sampling.temperature is None else sampling.temperature,
                        top_p=1.0 if sampling.top_p is None else sampling.top_p,
                        max_tokens=sampling.max_tokens,
                        seed=seed,
                        logprobs=0,
                        ignore_eos=bool(sampling.extra.get("ignore_eos", False)),
                        stop=list(sampling.stop) or None,
                    )
                )
        self._llm.wake_up()
        replies = iter(self._llm.generate(prompts, params, use_tqdm=False))
        self._llm.sleep(level=1)
        return [[_from_vllm(next(replies).outputs[0]) for _ in row] for row in seeds]

    def sync(self, named_params: Mapping[str, Any]) -> None:
        """Load weights into the engine and forget cached prefixes."""
        self._llm.wake_up()
        weights = [(name, value.detach()) for name, value in named_params.items()]
        self._llm.apply_model(lambda model: model.load_weights(weights))
        self._llm.reset_prefix_cache()


def _from_vllm(output: Any) -> Generated:
    ids = tuple(output.token_ids)
    logps = tuple(step[t].logprob for step, t in zip(output.logprobs, ids, strict=True))
    return Generated(ids, logps, "length" if output.finish_reason == "length" else "stop")
