"""Tools of an MCP server, through the official client.

Two ways, told apart by one declaration:

* a live server (`is_simulator=False`, the default): only tools that the server marks as read-only
  run during search; the first other call ends a path and waits for the plan to be carried out;
* a simulator (`is_simulator=True`): every path gets a session of its own, started anew and replayed
  where needed, so anything may run. For a server that keeps its state in the process, give a
  command (or a function that makes a server): a session is then a fresh process.

Marks of the server are hints: a server that lies about `readOnlyHint` can do harm. Does not know
models. Needs the package `mcp` (extra `mcp`). Source: Model Context Protocol; use in search: own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from tfgrpo.errors import ConfigError, MissingExtraError, PolicyError, boundary
from tfgrpo.protocols import ToolSpec
from tfgrpo.search.environments.protocol import Effect, StepResult
from tfgrpo.search.environments.replay import ReplayEnvironment
from tfgrpo.search.node import FINISH, action_name

__all__ = ["McpEnvironment", "McpSession"]

Server = Callable[[], Any]


def _mcp() -> Any:
    try:
        import mcp
    except ImportError as exc:
        raise MissingExtraError.of("mcp", "tools of an MCP server", "mcp") from exc
    return mcp


def _target(server: Any) -> Any:
    """Return what the client connects to: a URL, a command's parameters, or a server object."""
    if isinstance(server, (list, tuple)):
        if not server:
            raise ConfigError("an MCP server given as a command needs at least the program's name")
        return _mcp().StdioServerParameters(command=server[0], args=list(server[1:]))
    return server() if callable(server) else server


class McpSession:
    """One conversation with a server. It lives in a task of its own, as the client asks for."""

    def __init__(self, server: Any, *, timeout_s: float, max_observation_bytes: int) -> None:
        self._server, self._timeout_s = server, timeout_s
        self._max_bytes = max_observation_bytes
        self._client: Any = None
        self._ready = asyncio.Event()
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> McpSession:
        """Connect.

        Raises:
            PolicyError: the server cannot be reached or does not answer in time.
        """
        self._task = asyncio.create_task(self._live())
        ready = asyncio.create_task(self._ready.wait())
        with boundary(PolicyError, "MCP server"):
            done, _ = await asyncio.wait(
                {self._task, ready}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            ready.cancel()
            if self._task in done:
                await self._task
            if not self._ready.is_set():
                await self.close()
                raise PolicyError(f"MCP server: no connection within {self._timeout_s:g} s")
        return self

    async def _live(self) -> None:
        async with AsyncExitStack() as stack:
            client = _mcp().Client(_target(self._server))
            self._client = await stack.enter_async_context(client)
            self._ready.set()
            await self._leave.wait()

    async def tools(self) -> list[Any]:
        """Return the server's tools, all pages."""
        found: list[Any] = []
        cursor: str | None = None
        while True:
            with boundary(PolicyError, "MCP server, list of tools"):
                page = await asyncio.wait_for(
                    self._client.list_tools(**({"cursor": cursor} if cursor else {})),
                    self._timeout_s,
                )
            found.extend(page.tools)
            cursor = getattr(page, "next_cursor", None)
            if not cursor:
                return found

    async def act(self, action: Any) -> StepResult:
        """Call one tool; its failure is an outcome."""
        name = action_name(action)
        arguments = dict(action.get("arguments") or {}) if isinstance(action, Mapping) else {}
        try:
            with boundary(PolicyError, f"MCP tool {name!r:.80}"):
                result = await asyncio.wait_for(
                    self._client.call_tool(name, arguments), self._timeout_s
                )
        except PolicyError as exc:
            return StepResult(error=str(exc))
        text, notes = self._text(result)
        if result.is_error:
            return StepResult(error=text or f"MCP tool {name!r} failed", notes=notes)
        return StepResult(observation=text, notes=notes)

    def _text(self, result: Any) -> tuple[str, tuple[str, ...]]:
        parts = [_block_text(block) for block in result.content]
        structured = result.structured_content
        if structured is not None and not _is_said(structured, parts):
            parts.append(json.dumps(structured, ensure_ascii=False))
        text = "\n".join(p for p in parts if p)
        data = text.encode("utf-8", "replace")
        if len(data) <= self._max_bytes:
            return text, ()
        head = data[: self._max_bytes].decode("utf-8", "ignore")
        return f"{head}\n[cut: {len(data):,} bytes in all]", ("answer cut",)

    async def close(self) -> None:
        """Leave the conversation; a server started by command ends with it."""
        self._leave.set()
        if self._task is not None:
            if not self._ready.is_set():
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None


class McpEnvironment(ReplayEnvironment):
    """An MCP server as an environment.

    Args:
        server: a URL, a command as a list, a server object, or a function that makes one.
        is_simulator: see the module.
        effects: tool name to effect class, where the server's marks are wrong or missing.
        timeout_s: limit of connecting and of each call.
        finish: offer the `finish` tool.

    Use `await environment.open()` first, `await environment.close()` at the end.
    """

    def __init__(
        self,
        server: Any,
        *,
        is_simulator: bool = False,
        effects: Mapping[str, Effect] | None = None,
        timeout_s: float = 30.0,
        max_observation_bytes: int = 64_000,
        finish: bool = True,
    ) -> None:
        super().__init__(self._session_of, effect=self._effect_named, is_simulator=is_simulator)
        self._server, self._declared = server, dict(effects or {})
        self._timeout_s, self._max_bytes = timeout_s, max_observation_bytes
        self._finish = finish
        self._marks: dict[str, Effect] = {}
        self.specs: tuple[ToolSpec, ...] = ()

    async def open(self) -> McpEnvironment:
        """Read the server's tools and their marks."""
        session = await self._session_of()
        try:
            tools = await session.tools()
        finally:
            await session.close()
        self._marks = {t.name: _effect_from(t) for t in tools}
        specs = [ToolSpec(t.name, t.description or "", t.input_schema) for t in tools]
        if self._finish:
            from tfgrpo.search.environments.tools import FINISH_TOOL

            specs.append(FINISH_TOOL)
        self.specs = tuple(specs)
        return self

    async def _session_of(self) -> McpSession:
        session = McpSession(
            self._server, timeout_s=self._timeout_s, max_observation_bytes=self._max_bytes
        )
        return await session.open()

    async def apply(self, handle: Any, action: Any) -> StepResult:
        """Run one call; `finish` ends the path without asking the server."""
        if self._finish and action_name(action) == FINISH:
            arguments = action.get("arguments", {}) if isinstance(action, Mapping) else {}
            answer = str(arguments.get("answer", ""))
            return StepResult(handle, answer, is_terminal=True, tool_calls=0)
        return await super().apply(handle, action)

    def check(self, action: Any) -> Sequence[str]:
        """Return why a call cannot work; for `CheckedExpander`."""
        from tfgrpo.policies.tools import check_arguments

        name = action_name(action)
        spec = next((s for s in self.specs if s.name == name), None)
        if spec is None or not isinstance(action, Mapping):
            known = ", ".join(s.name for s in self.specs)
            return (f"unknown tool {name!r:.80}; the server has {known}",)
        return check_arguments(spec.parameters, dict(action.get("arguments") or {}))

    def _effect_named(self, action: Any) -> Effect:
        name = action_name(action)
        if name == FINISH and self._finish:
            return "pure"
        return self._declared.get(name) or self._marks.get(name, "irreversible")


def _is_said(structured: Mapping[str, Any], parts: Sequence[str]) -> bool:
    """Return whether the blocks say what the structured result says: as JSON, or its one value,
    or the items of that, a block each."""
    said = [_parsed(part) for part in parts]
    values = [structured, *(structured.values() if len(structured) == 1 else ())]
    return any(value == said or value in said for value in values)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _block_text(block: Any) -> str:
    """Return what a model can read of one block of a result: text, a file's text, an address."""
    text = getattr(block, "text", None)
    if isinstance(text, str):
        return text
    resource = getattr(block, "resource", None)
    if resource is not None:
        inner = getattr(resource, "text", None)
        if isinstance(inner, str):
            return inner
        blob = getattr(resource, "blob", None)
        return _text_of(blob, resource) or _named("resource", resource, blob)
    if getattr(block, "uri", None) is not None:
        return _named("link", block, None)
    return _named(str(getattr(block, "type", "block")), block, getattr(block, "data", None))


_TEXT_TYPE = re.compile(
    r"text/|application/(?:\S+\+)?(?:x-)?(?:json|jsonl|ndjson|xml|yaml|toml|javascript|typescript"
    r"|ecmascript|sql|graphql|sh|shellscript|python|tex|latex|x509-ca-cert|pem-file)\b",
    re.IGNORECASE,
)


def _text_of(blob: Any, resource: Any) -> str:
    """Return the text of a file sent as base64; empty where its media type is no text's."""
    if not isinstance(blob, str) or not _TEXT_TYPE.match(str(getattr(resource, "mime_type", ""))):
        return ""
    try:
        return base64.b64decode(blob, validate=True).decode("utf-8-sig")
    except ValueError:
        return ""


def _named(kind: str, block: Any, data: Any) -> str:
    """Return a mark for what is no text: kind, title, address, media type and size."""
    said = [kind]
    for name in ("title", "name", "uri", "mime_type", "description"):
        value = getattr(block, name, None)
        if value is not None and str(value) not in said:
            said.append(str(value))
    if isinstance(data, (str, bytes)):
        said.append(f"{len(data) * 3 // 4 if isinstance(data, str) else len(data):,} bytes")
    return f"[{' · '.join(said)}]"


def _effect_from(tool: Any) -> Effect:
    """Read a tool's hints; what is not marked as read-only may do anything."""
    marks = tool.annotations
    return "read" if marks is not None and marks.read_only_hint else "irreversible"
