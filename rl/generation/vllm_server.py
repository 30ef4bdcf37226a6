"""A vLLM server behind `protocols.Generator`: token ids over HTTP, new weights through a folder.

Does not know rewards or training. Source: vLLM's completions endpoint, and its development
endpoints `/collective_rpc` and `/reset_prefix_cache`.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.lm.finish_words import finish_of
from tfgrpo.protocols import Generated, Sampling
from tfgrpo.rl import distributed
from tfgrpo.rl.checkpoints.files import WEIGHTS, write_tensors

T = TypeVar("T")
TRIES_S = (1.0, 4.0)
"""Waits before further tries where a server is busy or away."""
LOOK_S = 10.0
"""Limit of a request that needs no work."""
AWAY = ("overloaded", "connection")
"""Failures after which the same request may be answered later, or by another server."""


class _Http:
    """JSON over HTTP with further tries where the server is busy or away."""

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
        # A server on this machine is never behind a proxy, whatever the environment names.
        is_near = urllib.parse.urlsplit(base_url).hostname in ("127.0.0.1", "localhost", "::1")
        proxies = urllib.request.ProxyHandler({} if is_near else None)
        self._opener = urllib.request.build_opener(proxies)

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Any], T] = lambda row: row,
        *,
        from_root: bool = False,
        waits_s: Sequence[float] = TRIES_S,
    ) -> T:
        """Return what `read` makes of the reply's JSON; with `from_root` the path stands beside
        `/v1`, not below it."""
        url = (self.url.removesuffix("/v1") if from_root else self.url) + path
        for wait_s in waits_s:
            try:
                return read(self._once(url, body))
            except ProviderError as exc:
                if exc.kind not in AWAY:
                    raise
            time.sleep(wait_s)
        return read(self._once(url, body))

    def get(self, path: str) -> Any:
        """Return the JSON of a page below `/v1`, asked for once; whoever is there answers soon."""
        return self._once(self.url + path, None, min(self._timeout_s, LOOK_S))

    def _once(
        self, url: str, body: Mapping[str, Any] | None, timeout_s: float | None = None
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers)
        try:
            with self._opener.open(request, timeout=timeout_s or self._timeout_s) as reply:
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


def each_draw(
    token_ids: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    width: int,
    draw: Callable[[tuple[int, ...], int], Generated],
) -> list[list[Generated]]:
    """Make every draw of every prompt, at most `width` at once, and return them by prompt."""
    asked = [(tuple(ids), seed) for ids, row in zip(token_ids, seeds, strict=True) for seed in row]
    with ThreadPoolExecutor(width) as pool:
        replies = pool.map(lambda pair: draw(*pair), asked)
        return [[next(replies) for _ in row] for row in seeds]


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
        self._is_stopped = threading.Event()

    @property
    def url(self) -> str:
        """Where it is."""
        return self._http.url

    def context_tokens(self) -> int | None:
        """Return the longest sequence that it says it takes; None where it does not say.

        Raises:
            ProviderError: it is away.
        """
        try:
            found = self._http.get("/models")["data"][0]["max_model_len"]
        except ProviderError as exc:
            if exc.kind == "connection":
                raise
            return None
        except (LookupError, TypeError):
            return None
        return None if found is None else int(found)

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Generated]]:
        """Return n continuations a prompt: one request a draw, so that each has its own seed."""
        del n
        return each_draw(
            token_ids, seeds, self._concurrency, lambda ids, seed: self.draw(ids, seed, sampling)
        )

    def draw(
        self,
        ids: Sequence[int],
        seed: int,
        sampling: Sampling,
        waits_s: Sequence[float] = TRIES_S,
    ) -> Generated:
        """Return one continuation.

        Raises:
            ProviderError: the server is away after every wait, refuses, or was stopped.
        """
        if self._is_stopped.is_set():
            raise ProviderError(f"{self.url}: sampling was stopped", kind="refused")
        limit = sampling.max_tokens
        if limit is not None and self._context_tokens is not None:
            limit = min(limit, self._context_tokens - len(ids))
        body = {
            "model": self._model,
            "prompt": list(ids),
            "seed": seed,
            "max_tokens": limit,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": bool(sampling.extra.get("ignore_eos", False)),
            "stop": list(sampling.stop),
        }
        return self._http.post("/completions", body, self._generated, waits_s=waits_s)

    def _generated(self, reply: Any) -> Generated:
        """Read one continuation; a reply that the server gave up is none (`ProviderError`)."""
        choices = reply.get("choices") if isinstance(reply, Mapping) else None
        choice = choices[0] if isinstance(choices, list) and choices else {}
        finish = finish_of(choice.get("finish_reason"))
        token_ids = choice.get("token_ids")
        logps = (choice.get("logprobs") or {}).get("token_logprobs")
        if token_ids is None or logps is None or len(token_ids) != len(logps) or None in logps:
            raise ProviderError(
                f"{self._http.url} returned no token ids or log-probs beside the text; training "
                "needs both: use vLLM 0.10 or newer",
                kind="bad_reply",
            )
        was_cut = finish == "length"
        return Generated(
            tuple(token_ids), tuple(map(float, logps)), "length" if was_cut else "stop"
        )

    def stop(self) -> None:
        """Begin no further request until new weights come; those in flight end."""
        self._is_stopped.set()

    def go_on(self) -> None:
        """Take requests again."""
        self._is_stopped.clear()

    def sync(self, named_params: Mapping[str, Any]) -> None:
        """Hand weights to `reload`: one process of several does, and the others wait for it."""
        if self._reload is None:
            raise ConfigError(
                "this vLLM server has no way to take new weights: pass reload=… to VllmServer, or "
                "train with engine.kind = 'own'"
            )
        self.go_on()
        if not distributed.world()[0]:
            self._reload(named_params)
        distributed.gather_objects(None)


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
        self.write(named_params)
        self.tell()

    def write(self, named_params: Mapping[str, Any]) -> None:
        """Replace the folder's weights."""
        part = self._folder / f".weights-{os.getpid()}"
        write_tensors(part, {n: t.detach().cpu() for n, t in named_params.items()})
        part.replace(self._folder / WEIGHTS)

    def tell(self, waits_s: Sequence[float] = TRIES_S) -> None:
        """Have the server read the folder's weights and forget what it cached under others.

        Raises:
            ConfigError: it has no endpoint for that.
            ProviderError: it is away.
        """
        for path, body in (
            ("/collective_rpc", {"method": "reload_weights"}),
            ("/reset_prefix_cache", {}),
        ):
            try:
                self._http.post(path, body, from_root=True, waits_s=waits_s)
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

    All processes must call it.

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
    # the first of several processes looks and writes; the others go by what it saw
    if distributed.gather_objects((path / "config.json").is_file())[0]:
        return path
    if not distributed.world()[0]:
        path.mkdir(parents=True, exist_ok=True)
        write_model(path)
    distributed.gather_objects(None)  # nobody ends, and has the others ended, before it is whole
    if must_run:
        raise ConfigError(
            f"wrote the starting weights into {folder!r}; now start the server with "
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {folder} and run the same command again"
        )
    return path
