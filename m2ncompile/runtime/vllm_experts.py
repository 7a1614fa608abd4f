"""How vLLM's workers have their experts, against what a plan assumes of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from m2ncompile.engine.expert_kernels import backend_of
from m2ncompile.errors import BindError, Problems
from m2ncompile.plan import Plan
from m2ncompile.spec import EngineSpec

__all__ = ["check_experts", "check_kernels"]

_TITLE = "the worker does not have the experts that the plan assumes"
#: Backends that reshape unquantized experts, by vLLM's names for them.
_NAMED = ("flashinfer_cutlass", "flashinfer_trtllm")


def check_experts(engine: EngineSpec, worker: int, model: nn.Module, parallel: Any) -> None:
    """Raises BindError unless `worker` has the experts that the plan's `engine` gives it.

    Names and shapes don't tell: they are the same wherever the experts are.
    """
    problems = Problems()
    if parallel.enable_eplb:
        problems.add(
            "vLLM",
            "it moves experts from slot to slot as it serves (EPLB), the plan expects each in one",
            "start vLLM without --enable-eplb",
        )
    replica, column = worker // (engine.tp * engine.pp), worker % engine.tp
    place = replica * engine.tp + column if engine.ep > 1 else 0
    for name, module in model.named_modules():
        if "_expert_map" not in module._buffers:
            continue
        manager: Any = module.expert_map_manager
        count: int = manager.global_num_experts
        slots = manager.expert_map
        got = list(range(count)) if slots is None else slots.tolist()
        expected = _linear(count, engine.ep, place)
        if got != expected:
            strategy = manager.placement_strategy
            problems.add(
                name,
                f"the worker has its experts {_words(got)} ({strategy}), "
                f"the plan expects {_words(expected)} (linear)",
                "was the plan built for another parallel layout?"
                if strategy == "linear"
                else "start vLLM with --expert-placement-strategy linear",
            )
    problems.raise_if_any(BindError, _TITLE)


def check_kernels(plan: Plan, model: nn.Module) -> None:
    """Raises BindError where experts are written that their kernel may not read as loaded.

    Forms don't tell: they are the same for several kernels.
    """
    problems = Problems()
    written = (
        plan.params[plan.landings[one.landing].param].name.rpartition(".")
        for one in plan.destinations
        if one.route == "direct" and one.landing is not None
    )
    asked = plan.inputs.engine.moe_backend
    for path in sorted({path for path, _, leaf in written if leaf in ("w13_weight", "w2_weight")}):
        try:
            experts = model.get_submodule(path)
        except AttributeError:  # on another pipeline stage
            continue
        backend, as_loaded = backend_of(experts)
        if as_loaded:
            continue
        named = f', or build it with engine.moe_backend = "{backend}"'
        problems.add(
            path,
            f"the worker runs its experts with {backend}, which may keep them otherwise than they "
            f'are loaded; the plan was built with engine.moe_backend = "{asked}" and writes them '
            "in place",
            "start vLLM with --moe-backend triton" + (named if backend in _NAMED else ""),
        )
    problems.raise_if_any(BindError, _TITLE)


def _linear(count: int, ep: int, place: int) -> list[int]:
    """The slot of every expert, -1 where it is another worker's; the first have what is over."""
    each, over = divmod(count, ep)
    first = place * each + min(place, over)
    here = range(first, first + each + (place < over))
    return [expert - first if expert in here else -1 for expert in range(count)]


def _words(slots: list[int]) -> str:
    held = sorted((slot, expert) for expert, slot in enumerate(slots) if slot >= 0)
    shown = ", ".join(str(expert) for _, expert in held[:8])
    return f"{shown}, ..." if len(held) > 8 else shown
