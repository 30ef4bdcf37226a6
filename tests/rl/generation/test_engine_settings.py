"""A vLLM server from settings alone, against a server that samples from the folder's weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_train import write_model
from tests.rl.test_trainer import metrics
from tfgrpo.cli.train import train
from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.protocols import Sampling
from tfgrpo.rl import distributed
from tfgrpo.rl.checkpoints.loaded_model import load_parts
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.generation.vllm_server import FolderReload, VllmServer, serving_folder


class Serving:
    """The endpoints that training uses, over the model in a folder.

    Args:
        folder: of the weights; may be made later.
        reloads: False takes no new weights but says that it did.
        dev_mode: False has no endpoint for new weights.
    """

    def __init__(self, folder: Path, *, reloads: bool = True, dev_mode: bool = True) -> None:
        self.folder, self.reloads, self.dev_mode = folder, reloads, dev_mode
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.fail_next: list[int] = []
        self._lock = threading.Lock()
        self._generator: GroupGenerator | None = None
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner._lock:
                    owner.keys.append(self.headers.get("Authorization"))
                    status, reply = owner.answer(self.path, body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        self.asked.append((path, body))
        if self.fail_next:
            return self.fail_next.pop(), b"busy"
        if path == "/v1/completions":
            return 200, json.dumps({"choices": [self.complete(body)]}).encode()
        if not self.dev_mode:
            return 404, b"no such path"
        if path == "/collective_rpc" and self.reloads:
            self._generator = None
        return 200, b""

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._generator is None:
            parts = load_parts(f"local:{self.folder}", device="cpu", dtype="float32")
            self._generator = GroupGenerator(
                parts.decoder, eos_ids=parts.eos_ids, detokenize=parts.text_of
            )
        sampling = Sampling(
            temperature=body["temperature"], max_tokens=body["max_tokens"], stop=tuple(body["stop"])
        )
        ((made,),) = self._generator.generate([body["prompt"]], 1, sampling, [[body["seed"]]])
        return {
            "token_ids": list(made.token_ids),
            "logprobs": {"token_logprobs": list(made.logprobs)},
            "finish_reason": made.finish,
        }

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Any]:
    opened: list[Serving] = []

    def start(**options: Any) -> Serving:
        opened.append(Serving(tmp_path / "served", **options))
        return opened[-1]

    yield start
    for server in opened:
        server.close()


def write_run(place: Path, server: Serving, *, run: str = "run", engine: bool = True) -> Path:
    write_model(place / "model")
    rows = [{"task_id": f"t{i}", "prompt": "abc" + chr(97 + i)} for i in range(4)]
    (place / "tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    section = f"""
[engine]
kind = "vllm-server"
base_url = "{server.url}"
folder = "{server.folder}"
api_key_env = "TFGRPO_TEST_KEY"
"""
    config = place / f"{run}.toml"
    config.write_text(
        f"""
[model]
lm = "local:{place / "model"}"
device = "cpu"
dtype = "float32"
[tasks]
path = "tasks.jsonl"
[verifier]
kind = "regex"
pattern = "[a-m]"
[rollout]
tasks_per_step = 2
group_size = 4
max_tokens = 4
mismatch_mean = 1e-3
[optimiser]
steps = 4
lr = 3e-2
[run]
folder = "{place / run}"
{section if engine else ""}"""
    )
    return config


def test_the_first_run_writes_the_folder_and_says_how_to_start_the_server(
    tmp_path: Path, serving: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TFGRPO_TEST_KEY", "sesame")
    server = serving()
    config = write_run(tmp_path, server)
    with pytest.raises(ConfigError, match=r"VLLM_SERVER_DEV_MODE=1 vllm serve .*served and run"):
        train(config, None, quiet=True)
    assert (server.folder / "model.safetensors").exists()
    assert server.asked == []


@pytest.mark.real
def test_a_server_that_takes_new_weights_trains_as_our_own_sampler_does(
    tmp_path: Path, serving: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TFGRPO_TEST_KEY", "sesame")
    server = serving()
    config = write_run(tmp_path, server)
    with pytest.raises(ConfigError, match="vllm serve"):
        train(config, None, quiet=True)
    train(config, None, quiet=True)
    found = metrics(tmp_path / "run")
    assert len(found) == 4 and any(row["grad_norm"] > 0 for row in found)
    paths = [path for path, _ in server.asked]
    assert paths.count("/collective_rpc") == paths.count("/reset_prefix_cache") >= 2
    assert ("/collective_rpc", {"method": "reload_weights"}) in server.asked
    assert set(server.keys) == {"Bearer sesame"}
    own = write_run(tmp_path, server, run="own", engine=False)
    train(own, None, quiet=True)
    ours = metrics(tmp_path / "own")
    assert [r["reward_mean"] for r in found] == [r["reward_mean"] for r in ours]
    assert [r["grad_norm"] for r in found] == pytest.approx(
        [r["grad_norm"] for r in ours], rel=1e-3
    )


@pytest.mark.real
def test_a_server_that_keeps_its_old_weights_stops_training(
    tmp_path: Path, serving: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TFGRPO_TEST_KEY", "sesame")
    server = serving(reloads=False)
    config = write_run(tmp_path, server)
    with pytest.raises(ConfigError, match="vllm serve"):
        train(config, None, quiet=True)
    with pytest.raises(ConfigError, match=r"differ from the trainer's.*weights not synced"):
        train(config, None, quiet=True)


def test_a_server_without_the_endpoint_is_told_how_to_start(tmp_path: Path, serving: Any) -> None:
    server = serving(dev_mode=False)
    server.folder.mkdir()
    with pytest.raises(ConfigError, match="start it as VLLM_SERVER_DEV_MODE=1"):
        FolderReload(server.folder, server.url)({})


def test_a_busy_server_is_asked_again(tmp_path: Path, serving: Any, monkeypatch: Any) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    server = serving()
    write_model(server.folder)
    engine = VllmServer(server.url, "m", context_tokens=10)
    server.fail_next = [503, 500]
    ((made,),) = engine.generate([[5] * 7], 1, Sampling(max_tokens=9), [[1]])
    assert waits == [1.0, 4.0] and len(made.token_ids) <= 3  # cut to what the context allows
    server.fail_next = [503] * 3
    with pytest.raises(ProviderError, match="answered 503"):
        engine.generate([[5]], 1, Sampling(max_tokens=1), [[1]])
    server.fail_next = [400]
    waits.clear()
    with pytest.raises(ProviderError, match="answered 400"):
        engine.generate([[5]], 1, Sampling(max_tokens=1), [[1]])
    assert waits == []


def test_the_servers_folder_is_never_the_models_own(tmp_path: Path) -> None:
    def never(path: Path) -> None:
        raise AssertionError("written")

    with pytest.raises(ConfigError, match="would be overwritten"):
        serving_folder(str(tmp_path), f"local:{tmp_path}", never, must_run=True)
    with pytest.raises(ConfigError, match=r"engine\.folder is empty"):
        serving_folder("", "local:x", never, must_run=True)


def test_one_process_of_several_writes_the_servers_folder(tmp_path: Path, monkeypatch: Any) -> None:
    """The others wait: one that ended earlier would have the writer ended with it."""
    told: list[str] = []

    def write(path: Path) -> None:
        told.append("written")
        (path / "config.json").write_text("{}")

    def ask(rank: int, *, must_run: bool) -> Path:
        monkeypatch.setattr(distributed, "world", lambda: (rank, 2))
        return serving_folder(str(tmp_path / "served"), "local:x", write, must_run=must_run)

    def gathered(value: Any) -> list[Any]:
        told.append("met")
        return [(tmp_path / "served" / "config.json").is_file(), value]

    monkeypatch.setattr(distributed, "gather_objects", gathered)
    for rank, expected in ((1, ["met", "met"]), (0, ["met", "written", "met"])):
        with pytest.raises(ConfigError, match="now start the server"):
            ask(rank, must_run=True)
        assert told == expected
        told.clear()
    assert ask(0, must_run=True) == ask(1, must_run=True) == tmp_path / "served"
    assert "written" not in told


def test_a_missing_key_is_named(monkeypatch: Any) -> None:
    monkeypatch.delenv("TFGRPO_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match="'TFGRPO_TEST_KEY' is not set"):
        VllmServer("http://127.0.0.1:1/v1", "m", api_key_env="TFGRPO_TEST_KEY")
    with pytest.raises(ConfigError, match="must begin with http"):
        VllmServer("127.0.0.1:1/v1", "m")
