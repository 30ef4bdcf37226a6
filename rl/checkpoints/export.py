"""The trained model as others load it: a Hugging Face folder with a model card, or adapters.

Does not know how it was trained beyond the settings it prints. Source: own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfgrpo.prompts import render
from tfgrpo.rl.checkpoints.files import sha256, write_tensors
from tfgrpo.rl.checkpoints.hub import Origin
from tfgrpo.rl.optim.lora import LoraWeights


def write_adapters(folder: Path, weights: LoraWeights, base_model: str) -> None:
    """Write LoRA adapters in PEFT's form beside the merged model."""
    place = folder / "adapter"
    place.mkdir(exist_ok=True)
    tensors = {f"base_model.model.{name}": m.value() for name, m in weights.masters().items()}
    write_tensors(place / "adapter_model.safetensors", tensors)
    config = weights.peft_config(base_model)
    (place / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def write_card(
    folder: Path, *, origin: Origin, config: Mapping[str, Any], evaluation: Mapping[str, Any]
) -> Path:
    """Write `README.md`: what it was made from, how, and how well it does on held-out tasks."""
    text = render(
        "rl_model_card",
        base=origin.hub_id or origin.name,
        head="\n".join(origin.card_lines()),
        settings=json.dumps(config, indent=1, sort_keys=True),
        result=result_words(evaluation),
        checksum=sha256(folder / "model.safetensors"),
    )
    path = folder / "README.md"
    path.write_text(text + "\n", encoding="utf-8")
    return path


def result_words(evaluation: Mapping[str, Any]) -> str:
    """Say what the held-out tasks showed."""
    if not evaluation:
        return "No held-out tasks were given, so nothing is claimed about quality."
    words = (
        f"Mean held-out reward {evaluation['mean']:.3f} (95 % interval {evaluation['low']:.3f} to "
        f"{evaluation['high']:.3f} over {evaluation['tasks']} tasks) after {evaluation['step']} "
        "steps, asked without hints."
    )
    before, gain = evaluation.get("before"), evaluation.get("gain")
    if before is None or gain is None:
        return words
    return (
        f"{words} Before training it was {before['mean']:.3f}: a change of "
        f"{gain['estimate']:+.3f} (95 % interval {gain['low']:+.3f} to {gain['high']:+.3f}, paired "
        "by task)."
    )
