"""Several vLLM servers: who is asked, who is left out, and that nobody answers with old weights."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.patience import PATIENCE_S
from tests.rl.beside import AHEAD
from tests.rl.generation.test_engine_settings import Serving, write_run
from tests.rl.test_trainer import comparable, metrics
from tfgrpo.cli.train import train
from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.protocols import Sampling
from tfgrpo.rl.checkpoints import files as checkpoint
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel, load_parts
from tfgrpo.rl.generation import vllm_fleet
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.generation.vllm_fleet import VllmFleet
from tfgrpo.rl.generation.vllm_server import FolderReload, VllmServer
from tfgrpo.rl.model.decoder import load_hf_weights

SAMPLING = Sampling(max_tokens=2)


class Numbered:
    """A server whose reply is (number of its weights, seed), read from the folder when told."""

    def __init__(self, folder: Path, log: list[tuple[Any, ...]], context: int = 64) -> None:
        self.folder, self.log, self.context = folder, log, context
        self.weights = 0
        self.is_away = False
        self.status = 200
        self.before: Callable[[str], None] = lambda path: None
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(lambda: owner.post(self.path, body))

            def do_GET(self) -> None:
                self.reply(lambda: {"data": [{"max_model_len": owner.context}]})

            def reply(self, make: Callable[[], Any]) -> None:
                owner.before(self.path)
                if owner.is_away:
                    return  # the connection ends without a word
                self.send_response(owner.status)
                self.end_headers()
                self.wfile.write(json.dumps(make()).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/collective_rpc":
            self.weights = int(load_file(self.folder / "model.safetensors")["w"])
        if path == "/v1/completions":
            self.log.append((self.url, tuple(body["prompt"]), body["seed"], self.weights))
            choice = {"token_ids": [self.weights, body["seed"]], "finish_reason": "length"}
            return {"choices": [{**choice, "logprobs": {"token_logprobs": [-1.0, -2.0]}}]}
        return {}


@pytest.fixture
def two(tmp_path: Path, monkeypatch: Any) -> Iterator[tuple[VllmFleet, Numbered, Numbered, Any]]:
    monkeypatch.setattr(vllm_fleet, "TRIES_S", (0.01, 0.01))
    log: list[tuple[Any, ...]] = []
    servers = [Numbered(tmp_path, log), Numbered(tmp_path, log)]
    yield fleet_of(tmp_path, servers), *servers, log
    for server in servers:
        server.server.shutdown()
        server.server.server_close()


def fleet_of(folder: Path, servers: list[Numbered]) -> VllmFleet:
    return VllmFleet(
        [(VllmServer(s.url, "m"), FolderReload(folder, s.url)) for s in servers], concurrency=2
    )


def draw(fleet: VllmFleet, prompts: int = 6) -> list[tuple[int, ...]]:
    """Four draws a prompt; a token row is (weights, seed)."""
    ids, seeds = (
        [(i, 7) for i in range(prompts)],
        [[10 * i + j for j in range(4)] for i in range(prompts)],
    )
    made = fleet.generate(ids, 4, SAMPLING, seeds)
    rows = [r.token_ids for rows in made for r in rows]
    assert [r[1] for r in rows] == [s for row in seeds for s in row]  # in order, whoever answered
    return rows


def hand_over(fleet: VllmFleet, number: int) -> None:
    fleet.sync({"w": torch.tensor(number)})


def test_draws_of_a_prompt_stay_together_and_prompts_are_spread(two: Any) -> None:
    fleet, first, second, log = two
    hand_over(fleet, 1)
    assert set(draw(fleet)) == {(1, 10 * i + j) for i in range(6) for j in range(4)}
    homes = defaultdict(set)
    for url, prompt, *_ in log:
        homes[prompt].add(url)
    assert all(len(urls) == 1 for urls in homes.values())
    assert min(Counter(url for url, *_ in log)[s.url] for s in (first, second)) >= 4


def test_a_server_that_dies_is_left_and_answers_again_once_it_has_the_weights(two: Any) -> None:
    fleet, first, second, log = two
    hand_over(fleet, 1)
    second.is_away = True
    assert {weights for weights, _ in draw(fleet)} == {1}
    hand_over(fleet, 2)  # which the second misses
    second.is_away = False  # back, with the weights of before
    log.clear()
    assert second.weights == 1 and {weights for weights, _ in draw(fleet)} == {2}
    assert {url for url, *_ in log} == {first.url}
    hand_over(fleet, 3)
    log.clear()
    assert {weights for weights, _ in draw(fleet)} == {3}
    assert {url for url, *_ in log} == {first.url, second.url}


def test_a_server_that_comes_back_within_a_draw_reads_the_weights_first(two: Any) -> None:
    """Both go away; the second comes back as one that was started on other weights."""
    fleet, first, second, log = two
    hand_over(fleet, 5)
    first.is_away = second.is_away = True

    def comes_back(path: str) -> None:
        if path == "/v1/models":  # nobody is left, so both are called
            second.weights, second.is_away = 4, False

    second.before = comes_back
    assert {weights for weights, _ in draw(fleet)} == {5}
    assert {url for url, *_ in log} == {second.url}


def test_a_server_that_is_overloaded_is_left_for_the_other(two: Any) -> None:
    fleet, first, second, log = two
    hand_over(fleet, 1)
    second.status = 503
    draw(fleet)
    asked = [url for url, *_ in log]
    assert asked.count(first.url) == 24 and asked.count(second.url) >= vllm_fleet.FAILURES
    log.clear()
    draw(fleet)  # it rests
    assert {url for url, *_ in log} == {first.url}


def test_when_all_are_away_the_error_is_typed(two: Any) -> None:
    fleet, first, second, _ = two
    hand_over(fleet, 1)
    first.is_away = second.is_away = True
    with pytest.raises(ProviderError, match="none of 2 vLLM servers answers") as caught:
        draw(fleet)
    assert caught.value.kind == "connection"
    with pytest.raises(ProviderError, match="none of 2 vLLM servers took the new weights"):
        hand_over(fleet, 2)


def test_a_request_that_is_refused_is_not_sent_elsewhere(two: Any) -> None:
    fleet, first, second, log = two
    hand_over(fleet, 1)
    first.status = second.status = 400
    with pytest.raises(ProviderError, match="answered 400"):
        fleet.generate([(1,)], 1, SAMPLING, [[1]])
    assert len(log) == 1


def test_servers_of_different_context_sizes_are_refused(two: Any) -> None:
    fleet, first, second, _ = two
    second.context = 32
    with pytest.raises(ConfigError, match=rf"{first.url}: 64, {second.url}: 32.*max-model-len"):
        hand_over(fleet, 1)


def test_a_stopped_fleet_begins_nothing_until_weights_come(two: Any) -> None:
    fleet, first, _, log = two
    hand_over(fleet, 1)
    held = threading.Event()

    def wait(path: str) -> None:
        fleet.stop()
        assert held.wait(PATIENCE_S)

    first.before = wait
    threading.Timer(0.05, held.set).start()
    with pytest.raises(ProviderError, match="sampling was stopped"):
        draw(fleet, prompts=50)
    assert len(log) < 200
    first.before = lambda path: None
    hand_over(fleet, 2)
    assert {weights for weights, _ in draw(fleet)} == {2}


class Watched(Serving):
    """Says when a request came and went; reads weights into the model that it has."""

    def __init__(self, folder: Path, events: list[tuple[str, str]]) -> None:
        super().__init__(folder)
        self.events = events
        self.parts: LoadedModel | None = None
        self.dies_in: float = math.inf
        """Requests for tokens until it dies; when it has missed two hand-overs it is back, with
        weights of 0."""
        self.to_miss = 2
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]

    def load(self) -> None:
        """Load the model while nobody else does: transformers is not made for threads."""
        self.parts = load_parts(f"local:{self.folder}", device="cpu", dtype="float32")
        self._generator = GroupGenerator(
            self.parts.decoder, eos_ids=self.parts.eos_ids, detokenize=self.parts.text_of
        )

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        self.dies_in -= path == "/v1/completions"
        if self.dies_in <= 0 < self.to_miss and self.parts is not None:
            self.to_miss -= path == "/collective_rpc"
            for parameter in self.parts.decoder.parameters():
                parameter.detach().zero_()
            raise ConnectionAbortedError
        self.events.append(("begin", path))
        own = self._generator  # which the base forgets when told to read weights
        if path == "/collective_rpc" and self.parts is not None:
            load_hf_weights(self.parts.decoder, load_file(self.folder / "model.safetensors"))
        found = super().answer(path, body)
        self._generator = own
        self.events.append(("end", path))
        return found


@pytest.mark.real
def test_two_servers_train_what_one_trains_and_reload_only_when_drained(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Though the second dies in the first step, misses two hand-overs and comes back."""
    monkeypatch.setenv("TFGRPO_TEST_KEY", "sesame")
    events: list[tuple[str, str]] = []
    found = []
    for n in (1, 2):
        place = tmp_path / str(n)
        place.mkdir()
        servers = [Watched(place / "served", events) for _ in range(n)]
        config = write_run(place, servers[0])
        urls = [s.url for s in servers]
        text = config.read_text().replace(f'base_url = "{urls[0]}"', f"base_urls = {urls}")
        config.write_text(text + f"max_staleness = {AHEAD['max_staleness']}\n")
        with pytest.raises(ConfigError, match="vllm serve"):
            train(config, None, quiet=True)
        events.clear()
        for server in servers:
            server.load()
        servers[n - 1].dies_in = 3 if n == 2 else math.inf
        train(config, None, quiet=True)
        paths = [[path for path, _ in server.asked] for server in servers]
        assert [p.count("/collective_rpc") for p in paths] == [5, 3][:n]
        since = paths[-1][::-1].index("/collective_rpc")
        assert "/v1/completions" in paths[-1][-since:]  # it answers again once it has read them
        for server in servers:
            server.close()
        in_flight = 0
        for what, path in events:  # over all servers
            in_flight += (what == "begin") - (what == "end") if path == "/v1/completions" else 0
            assert path == "/v1/completions" or not in_flight
        last = checkpoint.found(place / "run" / "checkpoints")[-1]
        rows = list(map(comparable, metrics(place / "run")))
        found.append((checkpoint.load(last)[1:], rows))
    (first, rows), (second, others) = found
    assert rows == others and [r["staleness"] for r in rows] == [0, 1, 1, 1]
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
