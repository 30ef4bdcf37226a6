"""The library and the router of a gateway's routes as tools of an MCP server (stdio).

For agents that take tools and not a base URL: `library` gives the lessons of a route, `route` says
which of its models is worth asking for a prompt. Reads the settings and, where a gateway has run,
its journal; sends nothing to any model and needs no key.

Does not know HTTP. Source: the Model Context Protocol; own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfgrpo.errors import ConfigError, MissingExtraError
from tfgrpo.experience.artefact import Artefact, from_row, load_artefact
from tfgrpo.serve.choosing import RouterChooser, open_chooser
from tfgrpo.serve.inject import Injection, inject_instructions
from tfgrpo.serve.learning.states import LearningState, Transition, apply
from tfgrpo.serve.settings import GatewaySettings, RouteSettings
from tfgrpo.store import Journal
from tfgrpo.store.journal import FILE

__all__ = ["library_of", "make_server"]


def library_of(settings: GatewaySettings, name: str) -> Artefact | None:
    """Return the library in force of a route: the promoted one, else the configured one.

    Raises:
        ConfigError: there is no such route.
    """
    route = _route(settings, name)
    folder = Path(settings.serve.folder)
    if (folder / FILE).exists():
        with Journal.open(folder, readonly=True) as journal:
            version = _promoted(journal, name)
            for found, payload in reversed(journal.libraries() if version else []):
                if found == version:
                    return from_row(payload, f"library {version} of the journal")
    return load_artefact(route.library) if route.library else None


def _promoted(journal: Journal, route: str) -> str:
    tables = journal.writer.read("SELECT name FROM sqlite_master WHERE name = 'transitions'")
    if not tables:
        return ""
    state = LearningState()
    rows = journal.writer.read(
        "SELECT at, version, event, who, reason, body FROM transitions WHERE route = ?"
        " ORDER BY version",
        (route,),
    )
    for at, version, event, who, reason, body in rows:
        state = apply(state, Transition(at, version, event, who, reason, json.loads(body)))
    return state.current


def _route(settings: GatewaySettings, name: str) -> RouteSettings:
    if name not in settings.routes:
        known = ", ".join(settings.routes) or "none"
        raise ConfigError(f"there is no route {name!r}; known are {known}")
    return settings.routes[name]


def make_server(settings: GatewaySettings) -> Any:
    """Return the MCP server; `run()` serves it over stdio.

    Raises:
        MissingExtraError: the extra `mcp` is not installed.
    """
    try:
        from mcp.server import MCPServer
    except ImportError as exc:
        raise MissingExtraError.of("mcp", "the MCP server", exc.name or "mcp") from exc
    server = MCPServer(
        "tfgrpo", instructions="Lessons learnt from practice, and which model to ask."
    )
    choosers: dict[str, RouterChooser] = {}

    def library(route: str) -> str:
        """Return the lessons that were learnt for a route, as text for a system prompt."""
        artefact = library_of(settings, route)
        return inject_instructions("", Injection.of(artefact))

    def route(route: str, prompt: str) -> dict[str, Any]:
        """Return the models of a route for a prompt, best first, with predicted success."""
        row = _route(settings, route)
        names = list(row.upstreams)
        if not row.router:
            return {"models": names, "predicted": {}}
        if route not in choosers:
            specs = {n: settings.upstreams[n].lm for n in names}
            choosers[route] = open_chooser(row.router, row.rule, specs)
        order, predicted = choosers[route].order(prompt, names)
        return {"models": order, "predicted": predicted}

    server.tool()(library)
    server.tool()(route)
    return server
