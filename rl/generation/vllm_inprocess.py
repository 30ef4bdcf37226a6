"""vLLM in this process behind `protocols.Generator`; for a server see `vllm_server`.

Does not know rewards or training. Source: vLLM's `LLM` interface.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import MissingExtraError
from tfgrpo.lm.finish_words import finish_of
from tfgrpo.protocols import Generated, Sampling


class VllmColocated:
    """A vLLM engine in this process; asleep (level 1) while the trainer works, on devices where
    vLLM can sleep.

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
        from vllm.platforms import current_platform

        self._vllm = vllm
        options.setdefault("enable_sleep_mode", current_platform.is_sleep_mode_available())
        self._sleeps = bool(options["enable_sleep_mode"])
        self._llm = vllm.LLM(path, **options)

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
        self._wake_up()
        replies = iter(self._llm.generate(prompts, params, use_tqdm=False))
        if self._sleeps:
            self._llm.sleep(level=1)
        return [[_from_vllm(next(replies).outputs[0]) for _ in row] for row in seeds]

    def sync(self, named_params: Mapping[str, Any]) -> None:
        """Load weights into the engine and forget cached prefixes."""
        self._wake_up()
        weights = [(name, value.detach()) for name, value in named_params.items()]
        # what was laid out for the kernels at the start can be loaded anew only by vLLM's own way
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self._llm.apply_model(_repack_head)
        self._llm.reset_prefix_cache()

    def _wake_up(self) -> None:
        if self._sleeps:
            self._llm.wake_up()


def _repack_head(model: Any) -> None:
    """Make the output layer of a model with tied embeddings follow its embeddings.

    vLLM's kernels for CPUs work on a packed copy, which its reload leaves as it was (0.32).
    """
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "weight") and head.weight.device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)


def _from_vllm(output: Any) -> Generated:
    ids = tuple(output.token_ids)
    logps = tuple(step[t].logprob for step, t in zip(output.logprobs, ids, strict=True))
    was_cut = finish_of(output.finish_reason) == "length"
    return Generated(ids, logps, "length" if was_cut else "stop")
