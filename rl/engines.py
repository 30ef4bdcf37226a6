"""Other makers of tokens behind `protocols.Generator`, and the gate that compares their numbers.

`VllmServer` asks a running vLLM server, `VllmColocated` a vLLM engine in this process.
`check_mismatch` compares what an engine reported with the trainer's own scores and stops training
when the two disagree, which catches stale weights, a wrong number type or another tokenizer.

Does not know rewards. Idea: engine mismatch metrics (TRL, verl, prime-rl) turned into a gate (own).
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError, MissingExtraError, ProviderError
from tfgrpo.protocols import Generated, Sampling


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far an engine's log-probs lie from the trainer's, in nats."""

    mean_abs: float
    """Mean of |Δ| over tokens."""
    max_row: float
    """Largest |ΣΔ| of one row."""
    n_tokens: int


@dataclass(frozen=True, slots=True)
class MismatchLimits:
    """When training stops. Defaults allow bfloat16's noise on short rows."""

    mean_abs: float = 0.03
    max_row_per_root_token: float = 0.25
    """A row's |ΣΔ| may grow with the root of its length: independent noise does."""


def measure_mismatch(
    engine_logps: Sequence[Sequence[float]], trainer_logps: Sequence[Sequence[float]]
) -> Mismatch:
    """Compare two scorings of the same tokens.

    Raises:
        ValueError: rows or lengths differ.
    """
    if [len(x) for x in engine_logps] != [len(y) for y in trainer_logps]:
        raise ValueError("both scorings must have the same rows of the same lengths")
    lengths = [len(x) for x in engine_logps]
    gap_D = _flat(engine_logps) - _flat(trainer_logps)
    row_D = np.repeat(np.arange(len(lengths)), lengths)
    row_gap_R = np.bincount(row_D, weights=gap_D, minlength=len(lengths))
    return Mismatch(
        mean_abs=float(np.abs(gap_D).sum()) / max(1, len(gap_D)),
        max_row=float(np.abs(row_gap_R).max(initial=0.0)),
        n_tokens=len(gap_D),
    )


def _flat(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    return np.fromiter(chain.from_iterable(rows), dtype=np.float64)


def check_mismatch(found: Mismatch, longest: int, limits: MismatchLimits, where: str) -> None:
    """Raise when an engine and the trainer disagree beyond the limits.

    Raises:
        ConfigError: names the figures, the limits and the usual causes.
    """
    row_limit = limits.max_row_per_root_token * max(1, longest) ** 0.5
    is_good = found.mean_abs <= limits.mean_abs and found.max_row <= row_limit
    if is_good:
        return
    raise ConfigError(
        f"{where}: the engine's log-probs differ from the trainer's by {found.mean_abs:.4f} nat a "
        f"token (limit {limits.mean_abs}) and {found.max_row:.2f} nat a row (limit "
        f"{row_limit:.2f}) over {found.n_tokens} tokens; usual causes: weights not synced, another "
        "number type, another tokenizer or chat template, a sampler that truncates"
    )


class VllmServer:
    """A running `vllm serve`, token ids in and out over its completions endpoint.

    Args:
        base_url: such as `http://127.0.0.1:8000/v1`.
        model: the served name.
        reload: called by `sync` with the weights; how a server takes them depends on how it runs
            (a shared folder and a restart, or its weight-transfer endpoint).
        timeout_s: limit of one request.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        reload: Callable[[Mapping[str, Any]], None] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url {base_url!r} must begin with http:// or https://")
        self._url = base_url.rstrip("/") + "/completions"
        self._model = model
        self._reload = reload
        self._timeout_s = timeout_s

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Generated]]:
        """Return n continuations a prompt: one request a draw, so that each has its own seed."""
        del n
        return [
            [self._one(list(ids), seed, sampling) for seed in row]
            for ids, row in zip(token_ids, seeds, strict=True)
        ]

    def _one(self, ids: list[int], seed: int, sampling: Sampling) -> Generated:
        body = {
            "model": self._model,
            "prompt": ids,
            "seed": seed,
            "max_tokens": sampling.max_tokens,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": bool(sampling.extra.get("ignore_eos", False)),
            "stop": list(sampling.stop),
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                choice = json.load(reply)["choices"][0]
        except urllib.error.HTTPError as exc:
            text = exc.read(300).decode(errors="replace")
            raise ProviderError(
                f"{self._url} answered {exc.code}: {text}",
                kind="overloaded" if exc.code >= 500 else "bad_request",
                status=exc.code,
            ) from exc
        except (OSError, KeyError, IndexError, json.JSONDecodeError) as exc:
            raise ProviderError(
                f"{self._url}: {type(exc).__name__}: {exc}", kind="connection"
            ) from exc
        token_ids = choice.get("token_ids")
        logps = (choice.get("logprobs") or {}).get("token_logprobs")
        if token_ids is None or logps is None or len(token_ids) != len(logps):
            raise ProviderError(
                f"{self._url} returned no token ids or log-probs beside the text; training needs "
                "both: use vLLM 0.10 or newer",
                kind="bad_reply",
            )
        was_cut = choice.get("finish_reason") == "length"
        return Generated(
            tuple(token_ids), tuple(map(float, logps)), "length" if was_cut else "stop"
        )

    def sync(self, named_params: Mapping[str, Any]) -> None:
        """Hand weights to `reload`."""
        if self._reload is None:
            raise ConfigError(
                "this vLLM server has no way to take new weights: pass reload=… to VllmServer, or "
                "train with engine = 'own'"
            )
        self._reload(named_params)


class VllmColocated:
    """A vLLM engine in this process; asleep (level 1) while the trainer works.

    Args:
        path: model folder the engine starts from.
        options: further arguments of `vllm.LLM`.
    """

    def __init__(self, path: str, **options: Any) -> None:
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
