"""The TOML file a user writes, as records.

`docs/spec.md` describes every key. `load_spec` reads one file and reports all
of its violations at once; nothing here touches the model or the engine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Annotated, Any, Literal

import msgspec

from m2ncompile.decode import Violations, convert_all
from m2ncompile.errors import Problem, Problems, SpecError, nearest
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
#: More than any engine is spread over; each one's model is built.
_WORKERS = 4096

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


class _Checked(msgspec.Struct, frozen=True, kw_only=True):
    """One whose fields depend on each other."""

    @staticmethod
    def violations(values: Mapping[str, Any]) -> Violations:
        """As `m2ncompile.decode` has it."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        if wrong := [": ".join(one) for one in self.violations(values)]:
            raise ValueError("; ".join(wrong))


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


class EngineSpec(_Checked, frozen=True, kw_only=True):
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
    #: As vLLM's `--moe-backend`, which workers must be given alike.
    moe_backend: Annotated[str, msgspec.Meta(pattern="^[a-z0-9_]+$")] = "auto"

    @staticmethod
    def violations(values: Mapping[str, Any]) -> Violations:
        if (target := values.get("target", TARGETS[0])) not in TARGETS:
            close = nearest(target, TARGETS)
            yield (
                "target",
                f'"{target}" is not known; known: {", ".join(TARGETS)}'
                + (f'; did you mean "{close}"?' if close else ""),
            )
        tp, dp, ep, pp = (values.get(key) for key in ("tp", "dp", "ep", "pp"))
        if tp and dp and ep and ep not in (1, tp * dp):
            yield (
                "ep",
                f"ep must be 1 (no expert parallelism) or tp * dp = {tp} * {dp} = {tp * dp}, "
                f"since vLLM spreads experts over all of them; got {ep}",
            )
        if tp and dp and pp and tp * dp * pp > _WORKERS:
            yield (
                "tp",
                f"tp * pp * dp = {tp} * {pp} * {dp} = {tp * pp * dp} workers; "
                f"at most {_WORKERS} are possible",
            )

    @property
    def workers(self) -> int:
        return self.tp * self.pp * self.dp


class RuleSpec(_Checked, frozen=True, kw_only=True):
    """A source layout for the tensors whose names match a glob."""

    #: Shell glob over the whole name; `*` crosses dots.
    match: Text
    #: Two mesh axes over all trainer ranks, row-major; the preset's when not given.
    mesh: tuple[Count, Count] | None = None
    #: `replicated`, or per mesh axis the tensor dim it shards or `replicate`.
    placements: Annotated[
        Literal["replicated"] | tuple[PlacementCode, PlacementCode],
        msgspec.Meta(
            description='expected "replicated", or for each of two mesh axes the tensor dim '
            '(0 to 15) that it shards or "replicate"'
        ),
    ]

    @staticmethod
    def violations(values: Mapping[str, Any]) -> Violations:
        placements = values.get("placements", "replicated")
        if placements == "replicated":
            return
        sharded = [code for code in placements if code != "replicate"]
        if not sharded:
            yield "placements", 'they replicate over both mesh axes: write "replicated"'
        if len(sharded) == 2:
            yield (
                "placements",
                f"{list(placements)} shard over both mesh axes; NCCL M2N carries one sharded "
                'axis, so one of them must be "replicate"',
            )


class TrainerSpec(_Checked, frozen=True, kw_only=True):
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

    @staticmethod
    def violations(values: Mapping[str, Any]) -> Violations:
        ranks, layout = values.get("ranks"), values.get("layout")
        if layout is not None and "shard_ranks" in values:
            shard_ranks = values["shard_ranks"]
            if layout != "hsdp":
                if shard_ranks is not None:
                    yield "shard_ranks", f'it goes with layout "hsdp", not "{layout}"'
            elif shard_ranks is None:
                yield "shard_ranks", 'layout "hsdp" needs it: the ranks of one shard group'
            elif ranks and ranks % shard_ranks:
                rest = ranks % shard_ranks
                yield (
                    "shard_ranks",
                    f"{shard_ranks} does not divide ranks {ranks} (remainder {rest})",
                )
        for index, rule in enumerate(values.get("rules", ())):
            if rule is not None and rule.mesh is not None and ranks:
                a, b = rule.mesh
                if a * b != ranks:
                    yield (
                        f"rules[{index}].mesh",
                        f"[{a}, {b}] covers {a} * {b} = {a * b} ranks; the trainer has {ranks}",
                    )


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
    except (ValueError, RecursionError) as error:  # int() and nesting have limits of their own
        raise SpecError(f"{path}: not valid TOML: {error}") from None
    problems = Problems()
    spec = convert_all(data, Spec, path.name, problems)
    _check_files(data.get("model"), path, problems)
    problems.raise_if_any(SpecError, title)
    assert spec is not None
    model = path.parent / spec.model.path
    manifest = path.parent / spec.model.manifest if spec.model.manifest else None
    name = spec.model.name or model.resolve().name
    if any("\ud800" <= character <= "\udfff" for character in name):
        message = f"the folder's name {name!a} is not UTF-8, which a plan can't say"
        raise SpecError(title, [Problem(f"{path.name}: model.name", message, "give it a name")])
    return msgspec.structs.replace(
        spec,
        model=msgspec.structs.replace(
            spec.model,
            path=str(model.resolve()),
            name=name,
            manifest=str(manifest.resolve()) if manifest else None,
        ),
    )


def _check_files(model: object, path: Path, problems: Problems) -> None:
    """What a spec's model names must be there, whatever else is wrong with the spec."""
    given = model if isinstance(model, dict) else {}
    if (folder := given.get("path")) and isinstance(folder, str):
        where, fix = f"{path.name}: model.path", "paths are relative to the spec file"
        try:
            if not (path.parent / folder / "config.json").is_file():
                message = f"expected a folder with a config.json; {path.parent / folder} has none"
                problems.add(where, message, fix)
        except OSError as error:  # no permission, too long
            problems.add(where, f"can't read {brief(folder)}: {error.strerror}", fix)
    if (listing := given.get("manifest")) and isinstance(listing, str):
        where = f"{path.name}: model.manifest"
        try:
            if not (path.parent / listing).is_file():
                problems.add(where, f"no such file: {path.parent / listing}")
        except OSError as error:
            problems.add(where, f"can't read {brief(listing)}: {error.strerror}")


def rule_placements(rule: RuleSpec) -> Placements | None:
    """The rule's placements as codes, None for `replicated`."""
    if rule.placements == "replicated":
        return None
    first, second = (REPLICATE if c == "replicate" else c for c in rule.placements)
    return first, second
