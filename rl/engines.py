"""Other makers of tokens behind `protocols.Generator`, and the gate that compares their numbers.

`VllmServer` asks a running vLLM server, `VllmColocated` a vLLM engine in this process.
`check_mismatch` compares what an engine reported with the trainer's own scores and stops training
when the two disagree, which catches stale weights, a wrong number type or another tokenizer.

Does not know rewards. Idea: engine mismatch metrics (TRL, verl, prime-rl) turned into a gate (own).
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError, MissingExtraError, ProviderError
from tfgrpo.protocols import Generated, Sampling
from tfgrpo.rl.checkpoint import WEIGHTS, write_tensors


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


class _Http:
    """JSON over HTTP with two further tries where the server is busy or away."""

    def __init__(self, base_url: str, timeout_s: float, api_key_env: str) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url {base_url!r} must begin with http:// or https://")
        key = os.environ.get(api_key_env, "") if api_key_env else ""
        if api_key_env and not key:
            raise ConfigError(f"engine.api_key_env: the variable {api_key_env!r} is not set")
        self.url = base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout_s = timeout_s

    def post(self, path: str, body: Mapping[str, Any], *, from_root: bool = False) -> Any:
        """Return the reply's JSON; with `from_root` the path stands beside `/v1`, not below it."""
        url = (self.url.removesuffix("/v1") if from_root else self.url) + path
        for wait_s in (1.0, 4.0, None):
            try:
                return self._once(url, body)
            except ProviderError as exc:
                if wait_s is None or exc.kind not in ("overloaded", "connection"):
                    raise
                time.sleep(wait_s)
        raise AssertionError("unreachable")

    def _once(self, url: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(url, json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                text = reply.read()
                return json.loads(text) if text.strip() else {}
        except urllib.error.HTTPError as exc:
            told = exc.read(300).decode(errors="replace")
            raise ProviderError(
                f"{url} answered {exc.code}: {told}",
                kind="overloaded" if exc.code >= 500 else "bad_request",
                status=exc.code,
            ) from exc
        except (OSError, json.JSONDecodeError) as exc:
            raise ProviderError(f"{url}: {type(exc).__name__}: {exc}", kind="connection") from exc


class VllmServer:
    """A running `vllm serve`, token ids in and out over its completions endpoint.

    Args:
        base_url: such as `http://127.0.0.1:8000/v1`.
        model: the served name.
        reload: called by `sync` with the weights; how a server takes them depends on how it runs
            (a shared folder and a restart, or its weight-transfer endpoint).
        timeout_s: limit of one request.
        concurrency: requests in flight; the server batches them.
        context_tokens: the model's window, which a reply is cut to; None leaves it to the server.
        api_key_env: environment variable that holds the server's key; empty for none.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        reload: Callable[[Mapping[str, Any]], None] | None = None,
        timeout_s: float = 600.0,
        concurrency: int = 64,
        context_tokens: int | None = None,
        api_key_env: str = "",
    ) -> None:
        self._http = _Http(base_url, timeout_s, api_key_env)
        self._model = model
        self._reload = reload
        self._concurrency = concurrency
        self._context_tokens = context_tokens

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Generated]]:
        """Return n continuations a prompt: one request a draw, so that each has its own seed."""
        del n
        asked = [
            (list(ids), seed) for ids, row in zip(token_ids, seeds, strict=True) for seed in row
        ]
        with ThreadPoolExecutor(self._concurrency) as pool:
            replies = pool.map(lambda pair: self._one(pair[0], pair[1], sampling), asked)
            return [[next(replies) for _ in row] for row in seeds]

    def _one(self, ids: list[int], seed: int, sampling: Sampling) -> Generated:
        limit = sampling.max_tokens
        if limit is not None and self._context_tokens is not None:
            limit = min(limit, self._context_tokens - len(ids))
        body = {
            "model": self._model,
            "prompt": ids,
            "seed": seed,
            "max_tokens": limit,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": bool(sampling.extra.get("ignore_eos", False)),
            "stop": list(sampling.stop),
        }
        reply = self._http.post("/completions", body)
        choices = reply.get("choices") or [{}]
        choice = choices[0]
        token_ids = choice.get("token_ids")
        logps = (choice.get("logprobs") or {}).get("token_logprobs")
        if token_ids is None or logps is None or len(token_ids) != len(logps):
            raise ProviderError(
                f"{self._http.url} returned no token ids or log-probs beside the text; training "
                "needs both: use vLLM 0.10 or newer",
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
                "train with engine.kind = 'own'"
            )
        self._reload(named_params)


class FolderReload:
    """Gives a vLLM server new weights through the folder that it was started from.

    The server must run on this machine (or see the folder) with VLLM_SERVER_DEV_MODE=1, which
    opens `/collective_rpc` and `/reset_prefix_cache`. Cached prefixes are of the old weights, so
    they are forgotten too.

    Args:
        folder: holds one `model.safetensors`, which is replaced whole.
        base_url, timeout_s, api_key_env: of the server.
    """

    def __init__(
        self, folder: Path, base_url: str, *, timeout_s: float = 600.0, api_key_env: str = ""
    ) -> None:
        self._folder = folder
        self._http = _Http(base_url, timeout_s, api_key_env)

    def __call__(self, named_params: Mapping[str, Any]) -> None:
        """Write the weights and have the server read them."""
        part = self._folder / f".weights-{os.getpid()}"
        write_tensors(part, {n: t.detach().cpu() for n, t in named_params.items()})
        part.replace(self._folder / WEIGHTS)
        for path, body in (
            ("/collective_rpc", {"method": "reload_weights"}),
            ("/reset_prefix_cache", {}),
        ):
            try:
                self._http.post(path, body, from_root=True)
            except ProviderError as exc:
                if exc.status not in (404, 405):
                    raise
                raise ConfigError(
                    f"the vLLM server has no {path}, so it cannot take new weights: start it as "
                    f"VLLM_SERVER_DEV_MODE=1 vllm serve {self._folder}"
                ) from exc


def serving_folder(
    folder: str, model: str, write_model: Callable[[Path], None], *, must_run: bool
) -> Path:
    """Return the folder that an engine reads weights from; make it from the starting weights.

    Args:
        folder: as set; only training writes there from then on.
        model: what is trained, as `local:...`; must be another folder.
        write_model: writes the model as it is now.
        must_run: True where a server has to be started on the new folder before training.

    Raises:
        ConfigError: no folder, the trained model's own, or a server that must be started first.
    """
    if not folder:
        raise ConfigError(
            "engine.folder is empty: name a folder for the weights that vLLM reads; it is made"
        )
    path = Path(folder)
    own = Path(model.partition(":")[2]).expanduser()
    if path.resolve() == own.resolve():
        raise ConfigError(
            f"engine.folder {folder!r} is the model that is trained; its weights would be "
            "overwritten: name another folder"
        )
    if (path / "config.json").is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    write_model(path)
    if must_run:
        raise ConfigError(
            f"wrote the starting weights into {folder!r}; now start the server with "
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {folder} and run the same command again"
        )
    return path


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
