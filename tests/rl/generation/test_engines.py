"""The vLLM server adapter against a scripted server, and the gate."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.protocols import Sampling
from tfgrpo.rl.generation.vllm_server import VllmServer
from tfgrpo.rl.update.logprob_mismatch import MismatchLimits, check_mismatch, measure_mismatch

pytestmark = pytest.mark.real


class Scripted:
    """A completions endpoint on loopback that keeps what it was asked."""

    def __init__(self, reply) -> None:
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append(body)
                status, payload = reply(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(payload).encode())

            def log_message(self, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve():
    opened = []

    def start(reply):
        opened.append(Scripted(reply))
        return opened[-1]

    yield start
    for server in opened:
        server.close()


def test_token_ids_go_in_and_come_out_with_a_seed_a_draw(serve) -> None:
    def reply(body):
        ids = [body["seed"], 7]
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0, -2.0]}}
        return 200, {"choices": [{**choice, "finish_reason": "length"}]}

    server = serve(reply)
    engine = VllmServer(server.url, "smol")
    made = engine.generate([(1, 2), (3,)], 2, Sampling(max_tokens=2), [[11, 12], [13, 14]])
    assert [[r.token_ids[0] for r in g] for g in made] == [[11, 12], [13, 14]]
    assert made[0][0].logprobs == (-1.0, -2.0) and made[0][0].finish == "length"
    asked = sorted(server.asked, key=lambda body: body["seed"])  # requests fly together
    assert [a["prompt"] for a in asked] == [[1, 2], [1, 2], [3], [3]]
    assert asked[0]["temperature"] == 1.0 and asked[0]["max_tokens"] == 2


def test_a_server_without_token_ids_is_refused(serve) -> None:
    server = serve(lambda body: (200, {"choices": [{"text": "hi"}]}))
    with pytest.raises(ProviderError, match="no token ids or log-probs"):
        VllmServer(server.url, "smol").generate([(1,)], 1, Sampling(max_tokens=2), [[0]])


def test_an_error_of_the_server_is_typed(serve) -> None:
    server = serve(lambda body: (503, {"error": "busy"}))
    with pytest.raises(ProviderError) as caught:
        VllmServer(server.url, "smol").generate([(1,)], 1, Sampling(max_tokens=2), [[0]])
    assert caught.value.kind == "overloaded" and caught.value.status == 503


def test_weights_reach_the_server_by_the_given_function() -> None:
    seen = []
    VllmServer("http://127.0.0.1:1/v1", "smol", reload=seen.append).sync({"w": 1})
    assert seen == [{"w": 1}]
    with pytest.raises(ConfigError, match="reload="):
        VllmServer("http://127.0.0.1:1/v1", "smol").sync({"w": 1})


def test_the_gate_passes_noise_and_stops_drift() -> None:
    trainer = [[-1.0] * 100, [-2.0] * 100]
    noise = [[-1.0 + (0.02 if i % 2 else -0.02) for i in range(100)], [-2.0] * 100]
    found = measure_mismatch(noise, trainer)
    assert found.mean_abs == pytest.approx(0.01)
    check_mismatch(found, 100, MismatchLimits(), "step 1")
    drift = [[-1.05] * 100, [-2.0] * 100]
    with pytest.raises(
        ConfigError,
        match=r"step 2: .*0\.0250 nat a token.*mismatch_mean.*5\.00 nat a row.*mismatch_row",
    ):
        check_mismatch(measure_mismatch(drift, trainer), 100, MismatchLimits(), "step 2")
