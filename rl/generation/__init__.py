"""Token generation: continuous batching over a paged cache, and vLLM engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfgrpo.protocols import Generator
    from tfgrpo.rl.checkpoints.loaded_model import LoadedModel
    from tfgrpo.rl.config import TrainConfig

__all__ = ["engine_of"]


def engine_of(config: TrainConfig, model: LoadedModel) -> Generator | None:
    """Return another maker of tokens, or None for the trainer's own.

    Raises:
        ConfigError: the server's folder is not set or is the model's own.
        MissingExtraError: vLLM is not installed.
    """
    e = config.engine
    if e.kind == "own":
        return None
    from tfgrpo.rl.checkpoints.loaded_model import write_model
    from tfgrpo.rl.generation.vllm_fleet import VllmFleet
    from tfgrpo.rl.generation.vllm_inprocess import VllmColocated
    from tfgrpo.rl.generation.vllm_server import FolderReload, VllmServer, serving_folder

    is_server = e.kind == "vllm-server"
    folder = serving_folder(
        e.folder, config.model.lm, lambda path: write_model(path, model), must_run=is_server
    )
    if not is_server:
        return VllmColocated(str(folder), **e.options)
    servers = []
    for url in e.base_urls or (e.base_url,):
        reload = FolderReload(folder, url, timeout_s=e.timeout_s, api_key_env=e.api_key_env)
        server = VllmServer(
            url,
            e.model or e.folder,
            reload=reload,
            timeout_s=e.timeout_s,
            concurrency=e.concurrency,
            context_tokens=model.decoder.shape.context,
            api_key_env=e.api_key_env,
        )
        servers.append((server, reload))
    if len(servers) == 1:
        return servers[0][0]
    return VllmFleet(servers, concurrency=e.concurrency)
