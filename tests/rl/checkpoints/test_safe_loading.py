"""A model folder from somewhere else cannot run code: what is refused, and that nothing is run."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - the attack under test
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.cli.test_train import write_model
from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.rl.checkpoints.loaded_model import load_parts
from tfgrpo.rl.checkpoints.safe_loading import check_folder
from tfgrpo.rl.config import TrainConfig


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self._mark,))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_model(folder)
    return folder


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_sound_folder_is_loaded(model: Path) -> None:
    parts = load_parts(f"local:{model}", device="cpu", dtype="float32")
    assert parts.decoder.shape.layers == 2


def test_pickled_weights_are_refused_and_never_read(model: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ConfigError, match=r"'pytorch_model\.bin', a pickle.*safetensors is needed"):
        load_parts(f"local:{model}", device="cpu")
    # the loader below would not read it either
    from tfgrpo.lm.local.loading import load_model

    with pytest.raises(ProviderError, match=r"model\.safetensors"):
        load_model(str(model), device="cpu")
    assert not mark.exists()


def test_pickles_beside_sound_weights_are_left_alone(model: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin"):
        (model / name).write_bytes(pickle.dumps(Bomb(mark)))
    load_parts(f"local:{model}", device="cpu", dtype="float32")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_models_own_code_is_refused_and_never_run(model: Path, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "ran"
    (model / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass M: pass\n")
    change(
        model / name,
        auto_map={
            "AutoConfig": "evil.M",
            "AutoModelForCausalLM": "evil.M",
            "AutoTokenizer": ["evil.M", None],
        },
        model_type="unheard-of",
        tokenizer_class="Unheard",
    )
    with pytest.raises(ConfigError, match=f"{name} asks for the model's own Python code"):
        load_parts(f"local:{model}", device="cpu")
    from tfgrpo.lm.local.loading import load_model

    with pytest.raises(ProviderError, match="custom code"):
        load_model(str(model), device="cpu")  # and asks nobody on the terminal
    assert not mark.exists()


def test_an_adapter_that_names_another_model_is_refused(model: Path) -> None:
    config = {"base_model_name_or_path": "somebody/else", "peft_type": "LORA"}
    (model / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="names another model to load; merge it"):
        load_parts(f"local:{model}", device="cpu")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"w": "../../elsewhere.safetensors"}}, "files of the folder itself"),
        ({"weight_map": {"w": "weights.bin"}}, "must be .safetensors"),
        ({"weight_map": {"w": "model-2.safetensors"}}, "which is missing"),
        ({"weight_map": {}}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(model: Path, index: Any, message: str) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        check_folder(model)


def test_an_empty_folder_and_broken_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no weights"):
        check_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"trust_remote_code": True}, "trust_remote_code"), ({"load_format": "pt"}, "load_format")],
)
def test_engine_options_cannot_lift_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_mapping({"engine": {"kind": "vllm", "options": options}})


def test_checkpoints_and_exports_hold_no_pickle(tmp_path: Path) -> None:
    from tests.rl.test_trainer import make
    from tests.rl.tiny import tiny_config

    trainer = make(tiny_config(tmp_path, optimiser={"steps": 1}, run={"save_every": 1}))
    trainer.train()
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {p.suffix for p in files} <= {".json", ".jsonl", ".safetensors"}
    for path in files:
        if path.suffix == ".safetensors":
            assert load_file(path)
        else:
            whole = path.read_text(encoding="utf-8")
            texts = whole.splitlines() if path.suffix == ".jsonl" else [whole]
            assert all(isinstance(json.loads(text), dict) for text in texts)
