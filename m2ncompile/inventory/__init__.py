"""Stage 1: every tensor of a checkpoint, with dtype and global shape, without weights.

Three origins, one record: safetensors headers (`read_safetensors`), a bare
`config.json` (`from_config`), a manifest (`read_manifest`). `read_inventory`
picks by what it finds. Importing this needs neither torch nor transformers;
only `from_config` loads them, when called.
"""

from m2ncompile.inventory.config import config_digest, from_config
from m2ncompile.inventory.manifest import read_manifest, write_manifest
from m2ncompile.inventory.read import content_key, origin_of, read_inventory
from m2ncompile.inventory.records import Inventory, Missing, TensorInfo, natural_key
from m2ncompile.inventory.safetensors import read_safetensors

__all__ = [
    "Inventory",
    "Missing",
    "TensorInfo",
    "config_digest",
    "content_key",
    "from_config",
    "natural_key",
    "origin_of",
    "read_inventory",
    "read_manifest",
    "read_safetensors",
    "write_manifest",
]
