"""The inventory from a bare `config.json`.

The tensors are those of transformers' module under their hub names
(`meta_model`), in the form they are stored in (`stored`); what checkpoints hold
beyond the module is named, not listed (`unlisted`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from m2ncompile.errors import InventoryError, Problem, Problems
from m2ncompile.inventory import unlisted
from m2ncompile.inventory.checks import check_tensor, shown
from m2ncompile.inventory.files import read_json
from m2ncompile.inventory.meta_model import INSTEAD, build
from m2ncompile.inventory.records import Inventory, TensorInfo, natural_key
from m2ncompile.inventory.stored import read_quantization, stored_form
from m2ncompile.inventory.unlisted import Group

__all__ = ["CONFIG_LIMIT", "config_digest", "from_config", "read_groups"]

#: Bytes; the longest real config is some 10 kB.
CONFIG_LIMIT = 16 * 2**20
#: Where ModelOpt before 0.31 puts how a checkpoint is quantized.
_QUANTIZATION = "hf_quant_config.json"


def from_config(folder: Path) -> Inventory:
    """What the checkpoint published with `folder/config.json` holds.

    Needs transformers and torch, neither network nor code from the folder.
    Raises `InventoryError`: the config is unreadable, of an architecture that
    transformers lacks, or quantized in a way that is not known here.
    """
    tensors, groups = read_groups(folder)
    return Inventory("config", tuple(tensors), tuple(group.record() for group in groups))


def read_groups(folder: Path) -> tuple[list[TensorInfo], list[Group]]:
    """As `from_config`, with the left-out tensors themselves rather than their count."""
    path = folder / "config.json"
    raw = _read(path)
    model_type: str = raw["model_type"]
    quantization = read_quantization(raw, str(path))
    built = build(raw, unlisted.mtp_layers(raw), quantization, str(path))

    def stored(tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
        return stored_form(tensors, quantization, built.dtype, str(path))

    listed, mtp = unlisted.split_mtp(model_type, built.tensors, built.layers)
    listed = sorted(stored(listed), key=lambda t: natural_key(t.name))
    problems = Problems()
    for tensor in listed:
        check_tensor(tensor, f"{path}: {shown(tensor.name)}", problems)
    problems.raise_if_any(InventoryError, "the config describes impossible tensors")
    groups = [
        *(replace(group, tensors=tuple(stored(group.tensors))) for group in mtp),
        *unlisted.buffers(model_type, built.heads, listed),
        *unlisted.tied(built.tied),
        *unlisted.uncounted(model_type, built.ignored),
    ]
    return listed, groups


def config_digest(model: Path) -> str:
    """SHA-256 of the model's config.json, whatever its white space and key order.

    With what vLLM's `get_config` reads beside it, where that is there. Raises `InventoryError`.
    """
    quantization = model / _QUANTIZATION
    digest = _content(model / "config.json")
    if quantization.exists():
        digest = sha256(f"{digest} {_content(quantization)}".encode()).hexdigest()
    return digest


def _content(path: Path) -> str:
    try:
        # JSON has no infinities; transformers reads and writes them.
        config = json.loads(path.read_text(encoding="utf-8"), parse_constant=str)
        return sha256(msgspec.json.encode(config, order="sorted")).hexdigest()
    except (OSError, ValueError, RecursionError) as error:
        raise InventoryError(f"{path}: can't read it: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    """`config.json` as it is, checked as far as it is used before transformers sees it."""
    title = "can't read the config"
    raw = read_json(path, CONFIG_LIMIT, title)
    if not isinstance(raw, dict):
        raise InventoryError(title, [Problem(str(path), f"expected an object; got {shown(raw)}")])
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        message = f"expected the name of a model type; got {shown(model_type)}"
        raise InventoryError(title, [Problem(f"{path}: model_type", message, INSTEAD)])
    mtp = unlisted.mtp_layers(raw)
    if type(mtp) is not int or not 0 <= mtp <= unlisted.MTP_LIMIT:
        message = f"expected 0 to {unlisted.MTP_LIMIT} layers; got {shown(mtp)}"
        raise InventoryError(title, [Problem(f"{path}: num_nextn_predict_layers", message)])
    return raw
