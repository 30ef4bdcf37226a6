"""Runs the Python blocks of docs/use.md with the packages that they name, against servers here.

OpenAI's protocol is spoken by the fault server, Anthropic's by a small one below.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tfgrpo.experience.artefact import Artefact, export_artefact
from tfgrpo.experience.library import from_texts
from tfgrpo.testing import FaultServer, say

PAGE = Path(__file__).parents[2] / "docs" / "use.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
FRAMEWORKS = {
    "openai": "from openai import OpenAI\n\nfrom tfgrpo",
    "anthropic": "from anthropic import",
    "langchain_openai": "from langchain_openai import",
    "dspy": "import dspy",
    "pydantic_ai": "from pydantic_ai import",
}
"""Package to what begins its block."""
LESSON = "Look the order up first."
QUESTION = "Where is order 4711?"


def block(package: str) -> str:
    """Return the one block about a package."""
    (code,) = [b for b in BLOCKS if FRAMEWORKS[package] in b]
    return code


def export_learnt(folder: Path) -> None:
    """Write an artefact where the page's code looks for it."""
    artefact = Artefact(from_texts([LESSON]), system="You answer customers.")
    export_artefact(artefact, folder / "runs" / "mine")


def run(package: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Run a block; returns what the server was sent as one text, and what was printed."""
    printed: list[str] = []
    names: dict[str, Any] = {"print": lambda *words: printed.append(" ".join(map(str, words)))}
    code = compile(block(package), PAGE.name, "exec")
    for key in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(key, "none")
    monkeypatch.setenv("DSPY_CACHEDIR", str(Path.cwd() / "dspy"))  # else an earlier reply is taken
    if package == "anthropic":
        with _anthropic_server() as (url, bodies):
            monkeypatch.setenv("ANTHROPIC_BASE_URL", url)
            exec(code, names)
            (body,) = bodies
            return json.dumps(body), printed[-1]
    reply = "[[ ## answer ## ]]\nAt the depot.\n\n[[ ## completed ## ]]"
    with FaultServer(say(reply if package == "dspy" else "At the depot.")) as server:
        for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
            monkeypatch.setenv(name, server.base_url)
        exec(code, names)
        (call,) = server.calls
        return json.dumps(call.body), printed[-1]


@contextmanager
def _anthropic_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            bodies.append(json.loads(self.rfile.read(size)))
            row = {
                "id": "m", "type": "message", "role": "assistant", "model": "m",
                "content": [{"type": "text", "text": "At the depot."}],
                "stop_reason": "end_turn", "usage": {"input_tokens": 3, "output_tokens": 3},
            }  # fmt: skip
            body = json.dumps(row).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
