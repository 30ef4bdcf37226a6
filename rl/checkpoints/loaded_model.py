"""A model loaded for training: decoder, tokenizer, and how both are written again.

Does not know training. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.rl.checkpoints import files as checkpoint
from tfgrpo.rl.checkpoints.safe_loading import check_folder
from tfgrpo.rl.model.decoder import Decoder, decoder_from_hf


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a trainer works on, loaded."""

    decoder: Decoder
    """The weights that run (and, with one process, are trained)."""
    tokenizer: Any
    save_extras: Callable[[Path], None]
    """Writes the model's config and tokenizer into a folder."""
    eos_ids: tuple[int, ...]
    name: str

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids)))


def load_parts(spec: str, *, device: str | None = None, dtype: str | None = None) -> LoadedModel:
    """Load a model by its `local:` spec.

    Raises:
        ConfigError: another kind of spec, a family that cannot be trained, or a folder with
            pickled weights or code of its own.
    """
    from tfgrpo.lm.local.loading import load_model

    kind, _, name = spec.partition(":")
    if kind != "local" or not name:
        raise ConfigError(
            f"model.lm is {spec!r}: training needs the weights, so it must be 'local:PATH', "
            "'local:ORG/NAME' or 'local:smollm2-135m'"
        )
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_folder(folder)
    loaded = load_model(name, device=device, dtype=dtype)
    model, tokenizer = loaded.model, loaded.tokenizer

    def save_extras(folder: Path) -> None:
        config = model.config
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return LoadedModel(
        decoder=decoder_from_hf(model),
        tokenizer=tokenizer,
        save_extras=save_extras,
        eos_ids=eos_ids_of(model, tokenizer),
        name=name,
    )


def check_asked(model: LoadedModel, *, dtype: str | None, device: str | None) -> None:
    """Refuse a model that was loaded in another way than the settings ask.

    Raises:
        ConfigError: its weights are of another type or on another device.
    """
    weight = model.decoder.norm
    is_type = str(weight.dtype).removeprefix("torch.")
    for key, asked, found in (("dtype", dtype, is_type), ("device", device, weight.device.type)):
        if asked is not None and asked.partition(":")[0] != found:
            raise ConfigError(
                f"model.{key} is {asked!r} and the model given has {found}: load it with "
                f"load_parts(..., {key}={asked!r}), or leave the key out"
            )


def eos_ids_of(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """All tokens that end a reply, from the generation config and the tokenizer."""
    found: list[int] = []
    configs = (getattr(model, "generation_config", None), model.config, tokenizer)
    for holder, name in zip(configs, ("eos_token_id",) * 3, strict=True):
        value = getattr(holder, name, None)
        for token in value if isinstance(value, (list, tuple)) else [value]:
            if token is not None and token not in found:
                found.append(int(token))
    return tuple(found)


def write_model(folder: Path, parts: LoadedModel) -> None:
    """Write the weights as they are, config and tokenizer into an existing folder."""
    checkpoint.write_tensors(folder / checkpoint.WEIGHTS, checkpoint.model_weights(parts.decoder))
    parts.save_extras(folder)
