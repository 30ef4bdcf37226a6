"""The schema says what is served, and no request that it allows or forbids is a failure of ours."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from tests.patience import LONG_S
from tests.serve.conftest import Start
from tests.serve.test_process import program
from tfgrpo.serve.wire.errors import KINDS
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer

SCHEMA: dict[str, Any] = json.loads(
    files("tfgrpo.serve").joinpath("openapi.json").read_text(encoding="utf-8")
)
METHODS = ("get", "post", "delete", "put", "patch")


def test_every_code_and_status_of_an_error_is_in_the_schema() -> None:
    codes = SCHEMA["components"]["schemas"]["Error"]["properties"]["error"]["properties"]["code"]
    assert set(codes["enum"]) == set(KINDS)
    told = {
        int(status)
        for path in SCHEMA["paths"].values()
        for operation in path.values()
        for status in operation["responses"]
    }
    assert {k.status for k in KINDS.values()} - told == {500}  # a bug of ours; nobody plans one


async def test_the_schema_is_served_and_names_every_path_and_method(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        async with client.get("/openapi.json") as response:
            assert response.status == 200 and await response.json() == SCHEMA
        for path, operations in SCHEMA["paths"].items():
            for method in METHODS:
                url = client.url + re.sub(r"\{\w+\}", "x", path)
                async with client.session.request(method, url, data=b"{}") as response:
                    is_served = response.status != 405
                assert is_served == (method in operations), (method, path, response.status)


async def test_every_path_that_the_page_of_documentation_names_is_in_the_schema() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    named = set(re.findall(r"`(?:GET|POST|DELETE) (/[\w/{}.]+)", page))
    assert named - {"/admin/act", "/admin/forget"} <= set(SCHEMA["paths"])


def replies(call: Any) -> Any:
    if call.path.endswith("/embeddings"):
        rows = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
        return answers.raw(json.dumps({"object": "list", "data": rows, "model": "m"}).encode())
    if call.path.endswith("/responses"):
        row = {"id": "resp_1", "object": "response", "status": "completed", "output": []}
        if call.is_stream:
            return answers.events([{"type": "response.completed", "response": row}], done=False)
        return answers.raw(json.dumps(row).encode())
    return answers.choices(*["yes"] * min(call.n, 3))


CONFIG = """
[serve]
folder = "gateway"
listen = "127.0.0.1:0"
admin_listen = ""
[upstreams.a]
lm = "{spec}"
rest_s = 0
[routes.r]
upstreams = ["a"]
aliases = ["0", "a"]
capture = true
feedback_tokens = true
[routes.r.learn]
enabled = false
"""


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(LONG_S)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["POSITIVE", "NEGATIVE"])
def test_no_request_of_the_schema_or_against_it_is_a_failure_of_ours(
    tmp_path: Path, kind: str
) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    checks = pytest.importorskip("schemathesis.checks")
    # The body's model names the route, so that most requests get further than its name.
    named = json.dumps(SCHEMA).replace(
        '"model": {"type": "string"}', '"model": {"enum": ["r", "a", "other"]}'
    )
    document = json.loads(named)
    schema = schemathesis.openapi.from_dict(document)
    seen: set[str] = set()
    with FaultServer(replies) as upstream:
        (tmp_path / "gateway.toml").write_text(CONFIG.format(spec=upstream.spec("m")))
        with program(tmp_path, "--config", str(tmp_path / "gateway.toml")) as (_, url):
            base = url.removesuffix("/v1")
            mode = schemathesis.GenerationMode[kind]
            for found in schema.get_all_operations():
                operation = found.ok()
                if kind == "NEGATIVE" and not (operation.body or operation.query):
                    continue

                @hypothesis_settings(
                    max_examples=25, deadline=None, database=None, derandomize=True,
                    suppress_health_check=list(HealthCheck),
                )  # fmt: skip
                @given(case=operation.as_strategy(generation_mode=mode))
                def ask(case: Any) -> None:
                    response = case.call(base_url=base, timeout=60)
                    case.validate_response(
                        response,
                        checks=[checks.not_a_server_error, checks.status_code_conformance,
                                checks.content_type_conformance,
                                checks.response_schema_conformance],
                    )  # fmt: skip
                    seen.add(str(response.status_code))

                ask()
        log = (tmp_path / "log").read_text()
    assert "Traceback" not in log and "a bug of ours" not in log
    assert {"200", "400"} & seen
