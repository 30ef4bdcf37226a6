"""`tfgrpo serve`: start the gateway, make keys.

Does not know how requests are served. Source: own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.terminal import printable

if TYPE_CHECKING:
    from tfgrpo.serve.settings import GatewaySettings

app = typer.Typer(help="Serve learnt libraries behind an OpenAI-compatible API.",
                  invoke_without_command=True)  # fmt: skip
key_app = typer.Typer(help="API keys.", no_args_is_help=True)
app.add_typer(key_app, name="key")


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    config: Annotated[
        str,
        typer.Option(
            "--config", "-c", help="TOML file; without one the embedded model is offered."
        ),
    ] = "",
    folder: Annotated[str, typer.Option(help="Folder of the journal, without a file.")] = (
        "runs/gateway"
    ),
    listen: Annotated[str, typer.Option(help="Address of the API, over the file's.")] = "",
    admin_listen: Annotated[str, typer.Option(help="Address of the page, over the file's.")] = "",
) -> None:
    """Serve an OpenAI-compatible API in front of your models."""
    if context.invoked_subcommand is not None:
        return
    from tfgrpo.serve.gateway import embedded_settings
    from tfgrpo.serve.settings import GatewaySettings

    def read() -> GatewaySettings:
        return GatewaySettings.from_toml(config) if config else embedded_settings(folder)

    hint = (
        ""
        if config
        else (
            "  The embedded model answers with an empty library. To go on: learn a library\n"
            "  (`tfgrpo init`, `tfgrpo learn`), name it as `library` of a route in a TOML\n"
            "  file (docs/serve.md), and start `tfgrpo serve --config FILE`."
        )
    )
    run_gateway(read, listen=listen, admin_listen=admin_listen, hint=hint)


def run_gateway(
    read: Callable[[], GatewaySettings], *, listen: str = "", admin_listen: str = "", hint: str = ""
) -> None:
    """Serve until TERM, telling addresses, routes and, last, a hint.

    Args:
        read: reads the settings, also anew at each HUP.
        listen, admin_listen: addresses in place of theirs.
        hint: for people.
    """
    from tfgrpo.serve.process import Running, new_loop
    from tfgrpo.serve.process import serve as run

    def settings() -> GatewaySettings:
        found = read()
        given = {"listen": listen, "admin_listen": admin_listen}
        serve = found.serve.model_copy(update={k: v for k, v in given.items() if v})
        return found.model_copy(update={"serve": serve})

    def tell(running: Running) -> None:
        typer.echo(f"{running.api_url}/v1")
        for route in running.gateway.routes.values():
            version = route.current.version
            typer.echo(f"  route {route.name}: {', '.join(route.settings.upstreams)}, "
                       f"library {version}", err=True)  # fmt: skip
        if running.page_url:
            typer.echo(f"  page {running.page_url}", err=True)
            if running.shows_secret:
                typer.echo(f"  its secret, told once: {running.secret}", err=True)
        if hint:
            typer.echo(hint, err=True)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run(settings(), tell, settings))


@key_app.command("new")
def new(name: Annotated[str, typer.Argument(help="Name of the key in the settings.")]) -> None:
    """Make a key: prints it once, and the lines for the settings."""
    from tfgrpo.serve.access.keys import hash_key, new_key
    from tfgrpo.serve.settings import NAME

    if not re.fullmatch(NAME, name):
        raise ConfigError(
            f"key name {name!r}: give up to 64 letters, digits, '.', '_' or '-', the first a "
            "letter or a digit"
        )
    key = new_key()
    typer.echo(key)
    table = f'"{name}"' if "." in name else name
    typer.echo(f'\n[keys.{table}]\nhash = "{hash_key(key)}"', err=True)


@app.command("forget")
def forget_user(
    config: Annotated[str, typer.Argument(help="The gateway's TOML file.")],
    end_user: Annotated[str, typer.Option(help="Whose content, as clients name it.")],
    key: Annotated[str, typer.Option(help="Of this API key's clients alone.")] = "",
) -> None:
    """Remove one end user's content, and name entries that came from it.

    The gateway must not run; of a running one the page does it (`POST /admin/forget`).
    """
    from pathlib import Path

    from tfgrpo.serve.content import forget
    from tfgrpo.serve.identity import read_secret
    from tfgrpo.serve.settings import GatewaySettings
    from tfgrpo.serve.tables import add_tables
    from tfgrpo.store import Journal

    folder = Path(GatewaySettings.from_toml(config).serve.folder)
    with Journal.open(folder) as journal:
        add_tables(journal)
        removed = forget(journal, folder, read_secret(folder), end_user, key or None)
    typer.echo(f"removed the content of {removed.requests} requests and {removed.groups} groups")
    for version, entry, text in removed.entries:
        typer.echo(f"library {version}: entry {entry} came from it: {printable(text)}")
    for path in removed.left:
        typer.echo(f"{path} is kept from a mended journal and may hold it still: delete that file")


@app.command("mcp")
def mcp(
    config: Annotated[str, typer.Argument(help="The gateway's TOML file.")],
) -> None:
    """Offer a gateway's libraries and router as MCP tools over stdio."""
    from tfgrpo.serve.mcp_server import make_server
    from tfgrpo.serve.settings import GatewaySettings

    make_server(GatewaySettings.from_toml(config)).run()
