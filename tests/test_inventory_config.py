"""Bare configs through transformers: against the published counts, and against real files."""

import json
import re
import socket
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from m2ncompile.dtypes import SAFETENSORS
from m2ncompile.errors import InventoryError
from m2ncompile.inventory import from_config, natural_key, read_inventory, read_safetensors
from m2ncompile.inventory.config import read_groups

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "plans" / "models"
#: What the hub publishes of each model: tensors, elements, bytes; and for one
#: model of each kind its families, as (name with # for numbers, count, dtype, shape).
TABLE: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests" / "data" / "model_table.json").read_text()
)


def test_every_model_is_in_the_table() -> None:
    assert sorted(TABLE) == sorted(path.name for path in MODELS.iterdir())


#: The gaps in what transformers models, by model: kind, names, tensors.
LEFT_OUT = {
    "DeepSeek-V3": [("mtp", "model.layers.61.*", 1564)],
    "DeepSeek-V3-bf16": [("mtp", "model.layers.61.*", 788)],
    "GLM-4.5-Air": [("mtp", "model.layers.46.*", 404)],
    "Kimi-K2-Instruct": [("buffer", "model.layers.*.self_attn.rotary_emb.inv_freq", 61)],
    "Llama-3.2-1B": [("tied", "lm_head.weight", 1)],
    "Qwen3-0.6B": [("tied", "lm_head.weight", 1)],
    "Qwen3-Next-80B-A3B": [("mtp", "mtp.*", 1553)],
    "gemma-3-1b-it": [("tied", "lm_head.weight", 1)],
    "gpt2": [("buffer", "h.*.attn.bias", 12), ("tied", "lm_head.weight", 1)],
}


@pytest.mark.parametrize("model", TABLE)
def test_all_that_is_published_is_listed_or_named(model: str) -> None:
    published = TABLE[model]
    listed, groups = read_groups(MODELS / model)
    records = [group.record() for group in groups]
    assert [(r.kind, r.names, r.tensors) for r in records] == LEFT_OUT.get(model, [])
    for record, group in zip(records, groups, strict=True):
        assert record.reason
        assert record.nbytes == sum(t.nbytes for t in group.tensors)
        assert all(fnmatchcase(t.name, record.names) for t in group.tensors)
        assert not any(fnmatchcase(t.name, record.names) for t in listed)

    stored = [group for group in groups if group.kind != "tied" or published["tied_stored"]]
    tensors = [*listed, *(tensor for group in stored for tensor in group.tensors)]
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert len(tensors) == published["tensors"]
    assert sum(tensor.nbytes for tensor in tensors) == published["nbytes"]
    assert sum(elements(tensor.shape) for tensor in tensors) == published["elements"]
    if "families" in published:
        families = Counter(
            (re.sub(r"\.\d+\.", ".#.", "." + t.name)[1:], t.dtype, t.shape) for t in tensors
        )
        assert families == {
            (name, dtype, tuple(shape)): count
            for name, count, dtype, shape in published["families"]
        }


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "GLM-4.5-Air", "gpt2"])
def test_the_inventory_counts_what_it_leaves_out(model: str) -> None:
    listed, groups = read_groups(MODELS / model)
    inventory = from_config(MODELS / model)
    assert inventory.origin == "config"
    assert inventory.tensors == tuple(listed)
    assert inventory.missing == tuple(group.record() for group in groups)
    assert [t.name for t in listed] == sorted((t.name for t in listed), key=natural_key)


def elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "gemma-3-1b-it", "DeepSeek-V3-bf16", "gpt2"])
def test_parameters_are_counted_as_transformers_counts_them(model: str) -> None:
    tensors, _ = read_groups(MODELS / model)
    biases = [t for t in tensors if t.name.endswith("e_score_correction_bias")]  # buffers there
    parameters = sum(elements(t.shape) for t in tensors)
    assert parameters - sum(elements(t.shape) for t in biases) == TABLE[model]["counted"]


# --- against checkpoints that transformers saves --------------------------------

DENSE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
SMALL: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "llama tied": DENSE | {"model_type": "llama", "tie_word_embeddings": True},
    "llama float32": DENSE | {"model_type": "llama", "dtype": "float32"},
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_moe": DENSE | MOE | {"num_experts": 4, "mlp_only_layers": [1]},
    "qwen3_next": DENSE
    | MOE
    | {
        "num_experts": 4,
        "num_hidden_layers": 5,
        "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    },
    "mixtral": DENSE | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "gpt_oss": DENSE | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "deepseek_v3": DENSE
    | MOE
    | MLA
    | {"n_routed_experts": 4, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    # The MTP layer is a MoE layer, though no listed layer is.
    "deepseek_v3 dense": DENSE
    | MOE
    | MLA
    | {
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "first_k_dense_replace": 3,
        "num_key_value_heads": 4,
    },
    "glm4_moe": DENSE | MOE | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "gemma3_text": DENSE,
    "phi3": DENSE | {"pad_token_id": 0},
    "olmo2": DENSE,
}


def saved(name: str, entries: dict[str, Any], folder: Path) -> Path:
    """A small model saved, loaded and saved again by transformers, in several files.

    Loading is what gives parameters that are kept in float32 their dtype.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{"model_type": name, "dtype": "bfloat16"} | entries)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "once")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "once", dtype=torch.bfloat16)
    if entries.get("dtype") == "float32":
        loaded = model
    loaded.save_pretrained(folder / "twice", max_shard_size="50KB")
    return folder / "twice"


@pytest.mark.parametrize("name", SMALL)
def test_equals_the_checkpoint_that_transformers_saves(name: str, tmp_path: Path) -> None:
    import safetensors

    folder = saved(name, SMALL[name], tmp_path)
    files = list(folder.glob("*.safetensors"))
    assert len(files) > 1
    stored = read_inventory(folder)
    assert stored.origin == "safetensors"
    assert stored == read_safetensors(folder)
    described = from_config(folder)
    assert described.tensors == stored.tensors
    assert described.digest == stored.digest

    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                piece = opened.get_slice(key)
                entry = next(t for t in stored.tensors if t.name == key)
                assert entry.shape == tuple(piece.get_shape())
                assert entry.dtype == SAFETENSORS[piece.get_dtype()]


def test_mtp_layer_is_of_the_kind_its_index_says(tmp_path: Path) -> None:
    """The layer after the last is a MoE layer where the listed ones are all dense."""
    config = SMALL["deepseek_v3 dense"] | {"architectures": ["DeepseekV3ForCausalLM"]}
    _, groups = read_groups(write(tmp_path, config))
    [mtp] = [group for group in groups if group.kind == "mtp"]
    assert mtp.names == "model.layers.3.*"
    assert sum(".experts." in tensor.name for tensor in mtp.tensors) == 3 * 4


def test_mxfp4_shapes_unpack_to_the_module(tmp_path: Path) -> None:
    """transformers' own unpacking of the stored form gives the unquantized tensors."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    entries = DENSE | {"model_type": "gpt_oss", "num_local_experts": 3, "dtype": "bfloat16"}
    plain = {t.name: t for t in from_config(write(tmp_path / "a", entries)).tensors}
    quantized = entries | {"quantization_config": {"quant_method": "mxfp4"}}
    packed = {t.name: t for t in from_config(write(tmp_path / "b", quantized)).tensors}
    experts = [name for name in plain if re.fullmatch(r".*experts\.(gate_up|down)_proj", name)]
    assert len(experts) == 2 * 3
    for name in experts:
        blocks, scales = packed.pop(f"{name}_blocks"), packed.pop(f"{name}_scales")
        assert blocks.dtype == scales.dtype == "uint8"
        unpacked = convert_moe_packed_tensors(
            torch.zeros(blocks.shape, dtype=torch.uint8),
            torch.full(scales.shape, 127, dtype=torch.uint8),
        )
        assert tuple(unpacked.shape) == plain.pop(name).shape
    assert packed == plain


# --- refusals --------------------------------------------------------------------


def write(folder: Path, config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    if not isinstance(config, str):
        config = json.dumps(config)
    (folder / "config.json").write_text(config)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(InventoryError) as caught:
        from_config(folder)
    return str(caught.value)


LLAMA = DENSE | {"model_type": "llama"}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{", "the file is no JSON"),
        ("[]", "expected an object; got []"),
        ("{}", "config.json: model_type: expected the name of a model type; got None"),
        ('{"model_type": "llama", "model_type": "llama"}', "'model_type': the key is there twice"),
        ({"model_type": "no_such_model"}, "has no 'no_such_model'"),
        (LLAMA | {"hidden_size": "wide"}, "hidden_size"),
        (LLAMA | {"hidden_size": -64}, "transformers can't build the model"),
        (LLAMA | {"vocab_size": 0}, "has the size 0: nothing to transfer"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 4096"),
        (LLAMA | {"dtype": "float7"}, "transformers can't build the model"),
        (
            LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
            "as LlamaForCausalLM;",
        ),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "got 'awq'"),
        (
            DENSE | {"model_type": "qwen3_moe", "num_experts": 10**9},
            "num_experts: expected at most 65536",
        ),
        (
            DENSE | {"model_type": "glm4_moe", "num_nextn_predict_layers": "one"},
            "num_nextn_predict_layers: expected 0 to 64 layers; got 'one'",
        ),
    ],
)
def test_refused(tmp_path: Path, config: Any, expected: str) -> None:
    assert expected in refusal(write(tmp_path, config))


def test_an_architecture_transformers_lacks_says_what_to_do(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, {"model_type": "no_such_model"}))
    assert "give the checkpoint's folder (safetensors) or a manifest instead" in text


def test_no_config(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path)


def test_no_code_of_the_folder_runs(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    config = LLAMA | {
        "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        "attn_implementation": "someone/kernel",
        "_attn_implementation": "someone/kernel",
    }
    plain = from_config(write(tmp_path / "plain", LLAMA))
    assert from_config(write(tmp_path, config)) == plain
    assert from_config(write(tmp_path, LLAMA | {"auto_map": None})) == plain


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def refuse(*args: Any, **_: Any) -> None:
        tried.append(args)
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for model in ("Llama-3.2-1B", "gpt-oss-20b", "Phi-3.5-mini-instruct"):
        from_config(MODELS / model)
    assert tried == []


def test_nothing_is_printed(tmp_path: Path) -> None:
    """This class warns when it is built for what it is not made for."""
    write(tmp_path, {"model_type": "camembert"})
    code = (
        "import sys; from pathlib import Path; from m2ncompile.inventory import from_config;"
        "from_config(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


# --- what a class skips on loading ------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("gpt_neox", [("buffer", "*attention.bias*"), ("buffer", "*attention.masked_bias*")]),
        ("glm4_moe_lite", [("mtp", "*model.layers.47*")]),
        ("exaone_moe", [("mtp", "*mtp*")]),
        ("mellum", [("mtp", "mtp.*")]),
    ],
)
def test_skipped_names_of_other_classes_are_named(
    model_type: str, expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Where the class skips tensors that nothing is known of, the inventory still says so."""
    missing = from_config(write(tmp_path, {"model_type": model_type})).missing
    assert [(m.kind, m.names) for m in missing] == expected
    assert {(m.tensors, m.nbytes) for m in missing} == {(0, 0)}


def test_the_name_that_is_kept_of_two_is_the_one_transformers_saves(tmp_path: Path) -> None:
    """The head stands first in this module; the embedding is what its files hold."""
    missing = from_config(write(tmp_path, {"model_type": "camembert"})).missing
    assert {m.names for m in missing} == {"lm_head.decoder.weight", "lm_head.decoder.bias"}
