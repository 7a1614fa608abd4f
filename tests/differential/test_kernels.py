"""Real vLLM classes built under `planning_kernels`: their parameters, and that nothing leaks."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state
from vllm.model_executor.layers.activation import NewGELU
from vllm.model_executor.layers.fused_moe import oracle, unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.oracle import int8, unquantized, w4a8
from vllm.model_executor.layers.quantization import fp8, mxfp4
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import CpuArchEnum
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention import selector

from m2ncompile.engine.kernels import PlanningKernel, planning_kernels
from m2ncompile.errors import EngineError
from m2ncompile.spec import TARGETS

pytestmark = pytest.mark.engine

MODELS = Path(__file__).parents[2] / "plans" / "models"
#: What vLLM calls compressed-tensors FP8: weights a channel, activations a token.
CHANNEL_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "dynamic": True,
                "symmetric": True,
            },
        }
    },
}


class Param(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    loader: str
    method: str


class NoProcessGroup:
    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = (lambda: size), (lambda: rank)


@contextmanager
def groups(tp: int, rank: int) -> Iterator[None]:
    """vLLM's groups for rank `rank` of `tp`, without process groups behind them."""

    def group(ranks: list[int]) -> Any:
        made: Any = object.__new__(parallel_state.GroupCoordinator)
        inside = ranks.index(rank)
        none = NoProcessGroup(len(ranks), inside)
        vars(made).update(
            unique_name="test",
            ranks=ranks,
            rank=rank,
            world_size=len(ranks),
            rank_in_group=inside,
            local_rank=rank,
            cpu_group=none,
            device_group=none,
            device=torch.device("cpu"),
            use_device_communicator=False,
            device_communicator=None,
            mq_broadcaster=None,
        )
        return made

    everyone, alone = group(list(range(tp))), group([rank])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_WORLD", "_TP", "_ETP", "_EP"):
            patch.setattr(parallel_state, name, everyone)
        for name in ("_PP", "_DP", "_DCP", "_PCP"):
            patch.setattr(parallel_state, name, alone)
        yield


class Reduced:
    """A model of `plans/models` with its first layers only and `changes` to its config."""

    def __init__(self, folder: Path, model: str, layers: int, **changes: Any) -> None:
        config = json.loads((MODELS / model / "config.json").read_text())
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
        for key, value in changes.items():
            config[key] = value
            if value is None:
                del config[key]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        self.folder = str(folder)

    def build(self, tp: int, rank: int = 0, *, ep: bool = False, moe_backend: str = "auto") -> Any:
        config = VllmConfig(
            model_config=ModelConfig(
                model=self.folder,
                tokenizer=self.folder,
                skip_tokenizer_init=True,
                enforce_eager=True,
            ),
            parallel_config=ParallelConfig(
                tensor_parallel_size=tp,
                distributed_executor_backend="mp" if tp > 1 else None,
                enable_expert_parallel=ep,
            ),
            cache_config=CacheConfig(block_size=16),
            device_config=DeviceConfig(device="cpu"),
            load_config=LoadConfig(load_format="dummy"),
            compilation_config=CompilationConfig(mode=0, cudagraph_mode="NONE"),
        )
        config.parallel_config.rank = rank
        config.kernel_config.moe_backend = moe_backend
        dtype = set_default_torch_dtype(config.model_config.dtype)
        with set_current_vllm_config(config), groups(tp, rank), dtype, torch.device("meta"):
            return initialize_model(vllm_config=config, model_config=config.model_config)

    def params(self, target: str | None, tp: int, **how: Any) -> dict[str, Param]:
        """Parameters of the last rank's model, built for `target` or as vLLM chooses here."""
        with planning_kernels(target) if target else nullcontext():
            return params_of(self.build(tp, tp - 1, **how))


def params_of(model: torch.nn.Module) -> dict[str, Param]:
    return {
        f"{prefix}.{name}": Param(
            param.dtype,
            tuple(param.shape),
            param.stride(),
            getattr(getattr(param, "weight_loader", None), "__qualname__", ""),
            type(getattr(module, "quant_method", None)).__name__,
        )
        for prefix, module in model.named_modules()
        for name, param in module.named_parameters(recurse=False)
    }


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds each reduced model's folder once."""
    made: dict[str, Reduced] = {}

    def get(model: str, layers: int, **changes: Any) -> Reduced:
        key = json.dumps([model, layers, changes])
        if key not in made:
            made[key] = Reduced(
                tmp_path_factory.mktemp("models") / str(len(made)), model, layers, **changes
            )
        return made[key]

    return get


def block_fp8(rows: int, cols: int, loader: str) -> list[Param]:
    """Weight and scales of a block-FP8 linear layer, blocks of 128 x 128, ragged ones counted."""
    scale = (-(-rows // 128), -(-cols // 128))
    return [
        Param(torch.float8_e4m3fn, (rows, cols), (cols, 1), loader, "Fp8LinearMethod"),
        Param(torch.float32, scale, (scale[1], 1), loader, "Fp8LinearMethod"),
    ]


COLUMN = "ColumnParallelLinear.weight_loader_v2"
ROW = "RowParallelLinear.weight_loader_v2"
MERGED = "MergedColumnParallelLinear.weight_loader_v2"


@pytest.mark.parametrize("tp", [1, 2])
def test_block_fp8_of_deepseek_v3(make: Any, tp: int) -> None:
    params = make("DeepSeek-V3", 4).params("cuda-sm90", tp)
    layer = "model.layers.3"

    def linear(name: str) -> list[Param]:
        return [params[f"{layer}.{name}.{p}"] for p in ("weight", "weight_scale_inv")]

    assert linear("self_attn.q_b_proj") == block_fp8(128 * 192 // tp, 1536, COLUMN)
    assert linear("self_attn.kv_b_proj") == block_fp8(128 * 256 // tp, 512, COLUMN)
    assert linear("self_attn.o_proj") == block_fp8(7168, 128 * 128 // tp, ROW)
    assert linear("mlp.shared_experts.gate_up_proj") == block_fp8(2 * 2048 // tp, 7168, MERGED)
    # 1536 + 512 + 64 rows on every rank: the last block holds 64.
    assert linear("self_attn.fused_qkv_a_proj") == block_fp8(2112, 7168, MERGED)
    assert params[f"{layer}.self_attn.q_a_layernorm.weight"].dtype == torch.bfloat16
    experts = f"{layer}.mlp.experts.routed_experts"
    half = 2048 // tp
    for name, dtype, shape in [
        ("w13_weight", torch.float8_e4m3fn, (256, 2 * half, 7168)),
        ("w13_weight_scale_inv", torch.float32, (256, 2 * half // 128, 56)),
        ("w2_weight", torch.float8_e4m3fn, (256, 7168, half)),
        ("w2_weight_scale_inv", torch.float32, (256, 56, half // 128)),
    ]:
        stride = (shape[1] * shape[2], shape[2], 1)
        assert params[f"{experts}.{name}"] == Param(
            dtype, shape, stride, "RoutedExperts.weight_loader", "Fp8MoEMethod"
        )
    # Nothing of a quantized layer is missing: three dense layers, one with experts.
    assert sum(name.endswith("weight_scale_inv") for name in params) == 3 * 6 + 6 + 2


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_block_fp8_of_qwen3_moe(make: Any, tp: int) -> None:
    params = make("Qwen3-30B-A3B-FP8", 2).params("cuda-sm90", tp)
    experts = "model.layers.1.mlp.experts.routed_experts"
    shard = 768 // tp
    # 768 / 4 = 192 cuts a block of 128: scales refined to gcd(128, 192) = 64.
    block = 64 if tp == 4 else 128
    assert params[f"{experts}.w13_weight"].shape == (128, 2 * shard, 2048)
    assert params[f"{experts}.w2_weight"].shape == (128, 2048, shard)
    assert params[f"{experts}.w13_weight_scale_inv"].shape == (
        128,
        2 * shard // block,
        2048 // block,
    )
    assert params[f"{experts}.w2_weight_scale_inv"].shape == (128, 2048 // block, shard // block)
    qkv = "model.layers.1.self_attn.qkv_proj"
    rows = 32 * 128 // tp + 2 * 128 * 4 // min(tp, 4)
    assert [params[f"{qkv}.{p}"] for p in ("weight", "weight_scale_inv")] == block_fp8(
        rows, 2048, "QKVParallelLinear.weight_loader_v2"
    )
    # The config's modules_to_not_convert.
    assert params["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert "model.layers.1.mlp.gate.weight_scale_inv" not in params


#: How each target's MXFP4 kernel pads gpt-oss's 2880 x 2880 at tp 1 and 2880 x 1440 at tp 2.
GPT_OSS_SIZES = [
    ("cuda-sm90", 1, (2880, 2880)),
    ("cuda-sm90", 2, (2880, 1472)),
    ("cuda-sm80", 1, (3072, 2944)),
    ("cuda-sm80", 2, (3072, 1536)),
    ("cuda-sm120", 2, (3072, 1536)),
    ("cpu", 2, (2880, 1440)),
]


@pytest.mark.parametrize(("target", "tp", "sizes"), GPT_OSS_SIZES)
def test_mxfp4_of_gpt_oss(make: Any, target: str, tp: int, sizes: tuple[int, int]) -> None:
    params = make("gpt-oss-20b", 2).params(target, tp)
    hidden, shard = sizes
    experts = "model.layers.1.mlp.experts.routed_experts."
    assert {
        name.removeprefix(experts): (param.dtype, param.shape)
        for name, param in params.items()
        if name.startswith(experts)
    } == {
        "w13_weight": (torch.uint8, (32, 2 * shard, hidden // 2)),
        "w13_weight_scale": (torch.uint8, (32, 2 * shard, hidden // 32)),
        "w13_bias": (torch.bfloat16, (32, 2 * shard)),
        "w2_weight": (torch.uint8, (32, hidden, shard // 2)),
        "w2_weight_scale": (torch.uint8, (32, hidden, shard // 32)),
        "w2_bias": (torch.bfloat16, (32, hidden)),
    }
    assert params[f"{experts}w13_weight"].method == "GptOssMxfp4MoEMethod"
    assert params["model.layers.1.attn.qkv_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("target", ["cuda-sm80", "cuda-sm90", "cpu"])
@pytest.mark.parametrize("tp", [1, 2])
def test_unquantized_gpt_oss(make: Any, target: str, tp: int) -> None:
    params = make("gpt-oss-20b", 2, quantization_config=None).params(target, tp)
    experts = "model.layers.1.mlp.experts.routed_experts."
    shard = 2880 // tp
    assert {
        name.removeprefix(experts): (param.dtype, param.shape)
        for name, param in params.items()
        if name.startswith(experts)
    } == {
        "w13_weight": (torch.bfloat16, (32, 2 * shard, 2880)),
        "w13_bias": (torch.bfloat16, (32, 2 * shard)),
        "w2_weight": (torch.bfloat16, (32, 2880, shard)),
        "w2_bias": (torch.bfloat16, (32, 2880)),
    }
    assert params[f"{experts}w13_weight"].method == "UnquantizedFusedMoEMethod"


@pytest.mark.parametrize(
    ("model", "layers", "changes", "tp", "ep"),
    [
        ("Qwen3-30B-A3B", 2, {}, 1, False),
        ("Qwen3-30B-A3B", 2, {}, 4, False),
        ("Qwen3-30B-A3B", 2, {}, 4, True),
        ("Mixtral-8x7B-v0.1", 2, {}, 2, False),
        ("DeepSeek-V2-Lite", 2, {}, 2, True),
        ("gpt-oss-20b", 2, {"quantization_config": None}, 2, True),
        ("Qwen3-30B-A3B", 2, {"quantization_config": CHANNEL_FP8}, 2, False),
    ],
)
@pytest.mark.parametrize("target", ["cuda-sm90", "cpu"])
def test_the_same_as_where_vllm_can_choose(
    make: Any, target: str, model: str, layers: int, changes: Any, tp: int, ep: bool
) -> None:
    reduced = make(model, layers, **changes)
    chosen_here = reduced.params(None, tp, ep=ep)
    assert any("routed_experts" in name for name in chosen_here)
    # Compared as lists: the order of parameters counts too.
    assert list(reduced.params(target, tp, ep=ep).items()) == list(chosen_here.items())


def test_blackwell_is_told_only_where_its_kernels_agree(make: Any) -> None:
    moe = make("Qwen3-30B-A3B", 2)
    assert moe.params("cuda-sm100", 2) == moe.params("cuda-sm90", 2)
    with pytest.raises(EngineError) as caught:
        moe.params("cuda-sm100", 4)
    (problem,) = caught.value.problems
    assert problem.where == "unquantized MoE"
    assert "2048 x 192" in problem.message
    assert "FLASHINFER_TRTLLM 2048 x 256, TRITON 2048 x 192" in problem.message
    with pytest.raises(EngineError, match="FLASHINFER_TRTLLM_MXFP4_BF16 3072 x 2944, TRITON 2880"):
        make("gpt-oss-20b", 2).params("cuda-sm103", 1)


def test_a_named_backend_decides(make: Any) -> None:
    moe, gpt_oss = make("Qwen3-30B-A3B", 2), make("gpt-oss-20b", 2)
    name = "model.layers.1.mlp.experts.routed_experts.w2_weight"
    padded = moe.params("cuda-sm100", 4, moe_backend="flashinfer_trtllm")
    assert padded[name].shape == (128, 2048, 256)
    assert moe.params("cuda-sm100", 4, moe_backend="triton")[name].shape == (128, 2048, 192)
    marlin = gpt_oss.params("cuda-sm90", 2, moe_backend="marlin")
    assert marlin == gpt_oss.params("cuda-sm80", 2)
    # 768 / 4 = 192 cuts a scale block; what "triton" does about it is the device's to say.
    with pytest.raises(EngineError, match="768 / 4 = 192"):
        make("Qwen3-30B-A3B-FP8", 2).params("cuda-sm90", 4, moe_backend="triton")


def test_compressed_tensors_below_ada_is_another_scheme(make: Any) -> None:
    model = make("Qwen3-30B-A3B", 2, quantization_config=CHANNEL_FP8)
    with pytest.raises(EngineError, match="vLLM loads it as W8A16 below"):
        model.params("cuda-sm86", 1)
    assert model.params("cuda-sm89", 1) == model.params("cuda-sm90", 1)


def test_an_unknown_choice_is_refused(make: Any) -> None:
    int4 = json.loads(json.dumps(CHANNEL_FP8))
    int4["format"] = "pack-quantized"
    del int4["config_groups"]["group_0"]["input_activations"]
    int4["config_groups"]["group_0"]["weights"] |= {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
    }
    model = make("Qwen3-30B-A3B", 2, quantization_config=int4)
    with pytest.raises(EngineError, match="choose_mp_linear_kernel"):
        model.params("cuda-sm90", 1)


def test_this_machine_has_no_say(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMX tiles are what vLLM looks for on x86, for quantized CPU kernels and for MLA."""
    monkeypatch.setattr(CpuPlatform, "get_cpu_architecture", lambda *_: CpuArchEnum.X86)
    gpt_oss, qwen = make("gpt-oss-20b", 2), make("Qwen3-30B-A3B-FP8", 2)
    deepseek = make("DeepSeek-V2-Lite", 2)
    built, backends = {}, {}
    for amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        built[amx] = [model.params("cuda-sm90", 2) for model in (gpt_oss, qwen, deepseek)]
        selector._cached_get_attn_backend.cache_clear()
        with planning_kernels("cuda-sm90"):
            mla = deepseek.build(2, 1).model.layers[0].self_attn.mla_attn.mla_attn
        backends[amx] = type(mla.impl)
        assert torch.cpu._is_amx_tile_supported() is amx
    assert built[False] == built[True]
    assert backends[False] is backends[True]
    # Left to itself, vLLM pads for its CPU kernel, which needs the tiles: 1440, not 1472.
    experts = "model.layers.1.mlp.experts.routed_experts"
    assert gpt_oss.params(None, 2)[f"{experts}.w2_bias"] == built[True][0][f"{experts}.w2_bias"]
    assert gpt_oss.params(None, 2)[f"{experts}.w13_bias"].shape == (32, 2 * 1440)


def test_an_operator_of_the_cpu_extension_need_not_be_installed() -> None:
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config), planning_kernels("cuda-sm90"):
        assert not list(NewGELU().parameters())
    assert not isinstance(getattr(torch.ops._C, "gelu_new", None), PlanningKernel)


def test_stand_ins_refuse_to_work(make: Any) -> None:
    with planning_kernels("cuda-sm90"):
        quantized = make("Qwen3-30B-A3B-FP8", 2).build(2)
        plain = make("Qwen3-30B-A3B", 2).build(2)
    qkv = quantized.get_submodule("model.layers.0.self_attn.qkv_proj")
    kernel = qkv.quant_method.fp8_linear
    assert isinstance(kernel, PlanningKernel)
    assert kernel.asked["weight_shape"] == (2560, 2048)
    with pytest.raises(EngineError, match="process_weights_after_loading"):
        qkv.quant_method.process_weights_after_loading(qkv)
    with pytest.raises(EngineError, match="apply_weights"):
        qkv.quant_method.apply(qkv, torch.empty(1, 2048, device="meta"))
    with pytest.raises(EngineError, match="a call"):
        kernel()
    for model in (quantized, plain):
        experts = model.get_submodule("model.layers.0.mlp.experts.routed_experts")
        with pytest.raises(EngineError, match="has no kernels"):
            experts.quant_method.process_weights_after_loading(experts)
        with pytest.raises(EngineError, match="is_monolithic"):
            _ = experts.quant_method.is_monolithic
        with pytest.raises(EngineError, match="a call"):
            experts.quant_method.experts_cls(moe_config=None)


def selection_functions() -> dict[tuple[str, str], object]:
    """Every vLLM module's attributes that are named like a kernel selection."""
    return {
        (module_name, name): value
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("vllm.") and isinstance(module, types.ModuleType)
        for name, value in list(vars(module).items())
        if inspect.isfunction(value)
        and (
            (name.startswith("select_") and name.endswith("_moe_backend"))
            or (name.startswith(("init_", "choose_")) and name.endswith("_linear_kernel"))
        )
    }


def test_every_copy_is_replaced_and_put_back() -> None:
    with planning_kernels("cpu"):
        pass  # imports what the block needs, so that both looks see the same modules
    for module in pkgutil.iter_modules(oracle.__path__, f"{oracle.__name__}."):
        importlib.import_module(module.name)
    before = selection_functions()
    assert (fp8.__name__, "select_fp8_moe_backend") in before
    assert (mxfp4.__name__, "select_mxfp4_moe_backend") in before
    with planning_kernels("cuda-sm90"):
        inside = selection_functions()
        assert inside.keys() == before.keys()
        # Only the replaced functions call this one.
        untouched = {name for name, value in inside.items() if value is before[name]}
        assert {name for _, name in untouched} == {"choose_scaled_mm_linear_kernel"}
        assert {module for module, _ in untouched} == {"vllm.model_executor.kernels.linear"}
    assert selection_functions() == before


def test_put_back_after_an_error_and_in_modules_imported_inside() -> None:
    original = unquantized_fused_moe_method.select_unquantized_moe_backend
    late: Any = types.ModuleType("vllm.imported_inside")
    sys.modules[late.__name__] = late
    try:
        with pytest.raises(ZeroDivisionError), planning_kernels("cuda-sm90"):
            late.copied = unquantized_fused_moe_method.select_unquantized_moe_backend
            assert late.copied is not original
            raise ZeroDivisionError
        assert late.copied is original
    finally:
        del sys.modules[late.__name__]
    assert unquantized_fused_moe_method.select_unquantized_moe_backend is original


def test_only_known_callers_are_answered() -> None:
    from vllm.model_executor.layers.quantization.online import mxfp4 as online

    with planning_kernels("cuda-sm90"):
        with pytest.raises(EngineError, match="select_mxfp4_moe_backend"):
            online.select_mxfp4_moe_backend(None)
        with pytest.raises(EngineError, match="select_unquantized_moe_backend"):
            unquantized.select_unquantized_moe_backend(None)


def test_no_second_replacement() -> None:
    with (
        planning_kernels("cuda-sm90"),
        pytest.raises(EngineError, match="replaced already"),
        planning_kernels("cuda-sm90"),
    ):
        pass


def test_targets() -> None:
    for target in TARGETS:
        with planning_kernels(target):
            pass
    with (
        pytest.raises(EngineError, match='unknown target "cuda-sm70"'),
        planning_kernels("cuda-sm70"),
    ):
        pass


def test_changed_functions_are_all_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(moe_config: Any, extra: Any) -> None: ...

    def another(*args: Any, **kwargs: Any) -> None: ...

    monkeypatch.setattr(unquantized, "select_unquantized_moe_backend", one_more)
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", another)
    monkeypatch.delattr(int8, "select_int8_moe_backend")
    wrapped = functools.wraps(w4a8.select_w4a8_moe_backend)(another)
    monkeypatch.setattr(w4a8, "select_w4a8_moe_backend", wrapped)
    with pytest.raises(EngineError) as caught, planning_kernels("cuda-sm90"):
        pass
    assert {p.where.removeprefix("vllm.model_executor.layers.") for p in caught.value.problems} == {
        "fused_moe.oracle.int8.select_int8_moe_backend",
        "fused_moe.oracle.unquantized.select_unquantized_moe_backend",
        "fused_moe.oracle.w4a8.select_w4a8_moe_backend",
        "fused_moe.unquantized_fused_moe_method.select_unquantized_moe_backend",
        "quantization.fp8.init_fp8_linear_kernel",
    }
    assert "expected parameters moe_config; got moe_config, extra" in str(caught.value)
    # Nothing is left replaced by the attempt.
    assert fp8.init_fp8_linear_kernel is another


def test_batch_invariance_takes_kernels_that_are_not_known(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(EngineError, match="batch invariance"):
        make("gpt-oss-20b", 2).params("cuda-sm90", 1)


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "is_cpu", lambda self: False)
    with pytest.raises(EngineError, match="VLLM_TARGET_DEVICE=cpu"), planning_kernels("cuda-sm90"):
        pass


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    with pytest.raises(EngineError) as caught, planning_kernels("cuda-sm90"):
        pass
    assert "known for vLLM 0.33.0, 0.32.0; 0.34.0 is installed" in str(caught.value)
