"""Routes by hand-made recordings: what keeps a module's parameters from being written directly."""

from __future__ import annotations

import msgspec
import pytest

from m2ncompile.compile.assemble import assemble
from m2ncompile.compile.validate import validate
from m2ncompile.engine.recording import Copy, LiveParam, Recording, Refusal, View
from m2ncompile.errors import PlanError
from m2ncompile.inventory import Inventory, TensorInfo
from m2ncompile.layout import Layout, Mesh
from m2ncompile.plan import Plan
from m2ncompile.routes import Destination, Landing, Param, Reason, Route, Wire
from m2ncompile.spec import TrainerSpec
from tests.plans import make_inputs

replace = msgspec.structs.replace
REASON = Reason("any", "because")
SOURCE = Layout(Mesh((2, 1), 0), None)


def line(size: int, step: int = 1) -> View:
    return View(0, (size,), (step,))


def live(name: str, dtype: str = "bfloat16", not_direct: str | None = None) -> LiveParam:
    return LiveParam(name, (), dtype, line(4), "Linear", "weight_loader", not_direct)


#: Two parameters of one module, each filled with one tensor on both workers.
PARAMS = (live("m.weight"), live("m.bias"))
COPIES = (Copy(0, line(4), 0, line(4)), Copy(1, line(4), 1, line(4)))


def recordings(
    params: tuple[LiveParam, ...] = PARAMS,
    copies: tuple[Copy, ...] = COPIES,
    refusals: tuple[Refusal, ...] = (),
) -> list[Recording]:
    return [Recording(rank, params, copies, refusals, ()) for rank in (0, 1)]


def plan_of(weight: Route, bias: Route, params: tuple[LiveParam, ...] = PARAMS) -> Plan:
    tensors = (TensorInfo("m.weight", "bfloat16", (4,)), TensorInfo("m.bias", "bfloat16", (4,)))

    def destination(index: int, route: Route) -> Destination:
        wire = Wire(0, (4,), SOURCE)
        if route == "fallback":
            return Destination(index, wire, route, Layout(Mesh((1, 2), 2), None), None, REASON)
        landing = Landing(Param(params[index].name, params[index].dtype, (4,)), (0,), ((4, 1),))
        reason = None if route == "direct" else REASON
        return Destination(index, wire, route, Layout(Mesh((2, 1), 2), None), landing, reason)

    inputs = make_inputs()
    inputs = replace(
        inputs,
        trainer=TrainerSpec(ranks=2, layout="ddp"),
        model=replace(inputs.model, inventory=Inventory("config", tensors).digest),
    )
    return assemble(
        inputs, tensors, [SOURCE, SOURCE], [destination(0, weight), destination(1, bias)]
    )


def refused(plan: Plan, found: list[Recording]) -> set[tuple[str, str]]:
    with pytest.raises(PlanError) as caught:
        validate(plan, found)
    return {(problem.where, problem.message) for problem in caught.value.problems}


def test_all_that_is_safe_is_direct() -> None:
    validate(plan_of("direct", "direct"), recordings())
    assert refused(plan_of("reload", "direct"), recordings()) == {
        ("m.weight", "it is reloaded, though writing it is all there is")
    }


@pytest.mark.parametrize("routes", [("direct", "direct"), ("direct", "reload")])
def test_a_module_goes_one_way(routes: tuple[Route, Route]) -> None:
    params = (PARAMS[0], live("m.bias", not_direct="it is packed"))
    validate(plan_of("reload", "reload"), recordings(params))
    found = refused(plan_of(*routes), recordings(params))
    assert ("m.weight", "it is written directly, but m.bias: it is packed") in found
    assert len(found) == routes.count("direct")


def test_a_converted_dtype_is_reloaded() -> None:
    params = (PARAMS[0], live("m.bias", "float32"))
    validate(plan_of("reload", "reload", params), recordings(params))
    assert refused(plan_of("direct", "direct", params), recordings(params)) == {
        ("m.weight", "it is written directly, but m.bias has dtype float32, it bfloat16"),
        ("m.bias", "it is written directly, but m.bias has dtype float32, it bfloat16"),
    }


def test_a_fallback_takes_its_module_along() -> None:
    """The loader spreads one element over all: no transfer does."""
    copies = (COPIES[0], Copy(1, line(4, 0), 1, line(4)))
    validate(plan_of("reload", "fallback"), recordings(copies=copies))
    assert refused(plan_of("direct", "fallback"), recordings(copies=copies)) == {
        ("m.weight", "it is written directly, but m.bias falls back")
    }


def test_what_can_be_carried_does_not_fall_back() -> None:
    assert refused(plan_of("reload", "fallback"), recordings()) == {
        ("m.bias", "it falls back, though transfers can place its shards")
    }


def test_no_module_is_safe_where_one_loader_needs_values() -> None:
    found = recordings(copies=COPIES[:1], refusals=(Refusal(1, "item", "load_weights"),))
    validate(plan_of("reload", "fallback"), found)
    assert refused(plan_of("direct", "fallback"), found) == {
        ("m.weight", "it is written directly, but where m.bias goes is not known")
    }


def test_a_parameter_is_as_the_module_has_it() -> None:
    other = (live("m.weight", "float32"), PARAMS[1])
    found = refused(plan_of("reload", "reload", other), recordings())
    assert (
        "m.weight",
        "the module has bfloat16 [4] by [1], the plan float32 [4] by [1]",
    ) in found
