"""The TOML file a user writes, as records.

`docs/spec.md` describes every key. `load_spec` reads one file and reports all
of its violations at once; nothing here touches the model or the engine.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from m2ncompile.decode import convert_all
from m2ncompile.errors import Problems, SpecError, nearest
from m2ncompile.layout import REPLICATE, Limits, Placements

__all__ = [
    "TARGETS",
    "EngineSpec",
    "ModelSpec",
    "ResolverSpec",
    "RuleSpec",
    "Spec",
    "TrainerSpec",
    "load_spec",
    "rule_placements",
]

Count = Annotated[int, msgspec.Meta(ge=1, le=65536)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
PlacementCode = Annotated[int, msgspec.Meta(ge=0, le=15)] | Literal["replicate"]

#: Platforms a plan can be made for: which one decides what an engine's
#: post-load processing does, hence which routes are safe.
TARGETS = (
    "cpu",
    "cuda-sm80",
    "cuda-sm86",
    "cuda-sm89",
    "cuda-sm90",
    "cuda-sm100",
    "cuda-sm103",
    "cuda-sm120",
)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is moved. Paths are relative to the spec file."""

    #: A folder with a `config.json`, alone or with safetensors beside it.
    path: Text
    #: What the plan calls the model; the folder's name when not given.
    name: Text | None = None
    #: A manifest file that lists the tensors, in place of what `path` holds.
    manifest: Text | None = None
    #: Globs of checkpoint tensors that the trainer does not send.
    exclude: tuple[Text, ...] = ()


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Who receives: the inference engine and how it is spread over workers."""

    name: Literal["vllm"] = "vllm"
    version: Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+\.\d+$")]
    target: Text
    tp: Count = 1
    ep: Count = 1
    pp: Count = 1
    dp: Count = 1
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    #: `auto` takes what the model's config says; else the engine's method name.
    quantization: Text = "auto"

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            close = nearest(self.target, TARGETS)
            raise ValueError(
                f'target "{self.target}" is not known; known: {", ".join(TARGETS)}'
                + (f'; did you mean "{close}"?' if close else "")
            )
        if self.ep not in (1, self.tp * self.dp):
            raise ValueError(
                f"ep must be 1 (no expert parallelism) or tp * dp = {self.tp} * {self.dp} = "
                f"{self.tp * self.dp}, since vLLM spreads experts over all of them; got {self.ep}"
            )

    @property
    def workers(self) -> int:
        return self.tp * self.pp * self.dp


class RuleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A source layout for the tensors whose names match a glob."""

    #: Shell glob over the whole name; `*` crosses dots.
    match: Text
    #: Two mesh axes over all trainer ranks, row-major; the preset's when not given.
    mesh: tuple[Count, Count] | None = None
    #: `replicated`, or per mesh axis the tensor dim it shards or `replicate`.
    placements: Literal["replicated"] | tuple[PlacementCode, PlacementCode]

    def __post_init__(self) -> None:
        if self.placements != "replicated":
            sharded = [code for code in self.placements if code != "replicate"]
            if not sharded:
                raise ValueError(
                    'placements replicate over both mesh axes: write placements = "replicated"'
                )
            if len(sharded) == 2:
                raise ValueError(
                    f"placements {list(self.placements)} shard over both mesh axes; NCCL M2N "
                    'carries one sharded axis, so one of them must be "replicate"'
                )


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends: how many ranks and how each tensor lies on them."""

    ranks: Count
    #: `ddp`: every rank holds everything. `fsdp`: dim 0 over all ranks.
    #: `hsdp`: dim 0 over groups of `shard_ranks`, replicated between groups.
    layout: Literal["ddp", "fsdp", "hsdp"]
    shard_ranks: Count | None = None
    #: Tensors that the preset does not split evenly: `error`, or `replicate`,
    #: for a trainer that holds or gathers them whole.
    uneven: Literal["error", "replicate"] = "error"
    #: The first rule that matches a tensor decides; the preset decides the rest.
    rules: tuple[RuleSpec, ...] = ()

    def __post_init__(self) -> None:
        problems = []
        if self.layout == "hsdp":
            if self.shard_ranks is None:
                problems.append('layout "hsdp" needs shard_ranks, the ranks of one shard group')
            elif self.ranks % self.shard_ranks:
                problems.append(
                    f"shard_ranks {self.shard_ranks} does not divide ranks {self.ranks} "
                    f"(remainder {self.ranks % self.shard_ranks})"
                )
        elif self.shard_ranks is not None:
            problems.append(f'shard_ranks goes with layout "hsdp", not "{self.layout}"')
        for index, rule in enumerate(self.rules):
            if rule.mesh is not None and rule.mesh[0] * rule.mesh[1] != self.ranks:
                a, b = rule.mesh
                problems.append(
                    f"rules[{index}].mesh [{a}, {b}] covers {a} * {b} = {a * b} ranks; "
                    f"the trainer has {self.ranks}"
                )
        if problems:
            raise ValueError("; ".join(problems))


class ResolverSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How destinations are found."""

    #: `traced`: from recordings of the model's own loaders. `vllm`: exactly what
    #: vLLM's own `nccl_m2n` backend resolves.
    name: Literal["traced", "vllm"] = "traced"


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One model, one trainer layout, one inference layout."""

    model: ModelSpec
    engine: EngineSpec
    trainer: TrainerSpec
    resolver: ResolverSpec = ResolverSpec()
    limits: Limits = Limits()


def load_spec(path: Path) -> Spec:
    """Read a spec; `model.path` and `model.manifest` come back absolute.

    Raises SpecError listing every violation with the file and the key path.
    """
    title = f"{path}: not a valid spec"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: can't read the spec: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not valid TOML: {error}") from None
    problems = Problems()
    spec = convert_all(data, Spec, path.name, problems)
    problems.raise_if_any(SpecError, title)
    assert spec is not None

    model = path.parent / spec.model.path
    if not (model / "config.json").is_file():
        problems.add(
            f"{path.name}: model.path",
            f"expected a folder with a config.json; {model} has none",
            "paths are relative to the spec file",
        )
    manifest = path.parent / spec.model.manifest if spec.model.manifest else None
    if manifest is not None and not manifest.is_file():
        problems.add(f"{path.name}: model.manifest", f"no such file: {manifest}")
    problems.raise_if_any(SpecError, title)
    return msgspec.structs.replace(
        spec,
        model=msgspec.structs.replace(
            spec.model,
            path=str(model.resolve()),
            name=spec.model.name or model.resolve().name,
            manifest=str(manifest.resolve()) if manifest else None,
        ),
    )


def rule_placements(rule: RuleSpec) -> Placements | None:
    """The rule's placements as codes, None for `replicated`."""
    if rule.placements == "replicated":
        return None
    first, second = (REPLICATE if c == "replicate" else c for c in rule.placements)
    return first, second
