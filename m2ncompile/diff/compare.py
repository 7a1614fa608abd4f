"""Plan x plan -> Difference. Pure, total, and linear in the number of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import msgspec

from m2ncompile.collector import collector_paused
from m2ncompile.diff.grouping import NameTree, pattern
from m2ncompile.diff.inputs import input_changes, input_paths
from m2ncompile.diff.layouts import layout_text, pair_text, relative
from m2ncompile.diff.matching import Matches, match
from m2ncompile.diff.records import Amount, Difference, Group, Stacks
from m2ncompile.dtypes import nbytes
from m2ncompile.errors import PlanError, Problem
from m2ncompile.families import numberless
from m2ncompile.layout import Layout
from m2ncompile.plan import Plan, PlanDestination
from m2ncompile.plan_check import layouts_of
from m2ncompile.routes import Reason, Route
from m2ncompile.summary import summarize

__all__ = ["check_comparable", "compare", "marks"]

#: A dtype and a shape.
_Geometry = tuple[str, tuple[int, ...]]
#: Of a landing, in the order in which `_Side.landings` has them.
_ASPECTS = ("parameter", "form of it", "dims", "offset")
#: What of a change is shown; tensors with one of these form a group.
_Texts = tuple[str | None, str | None]


def check_comparable(before: Plan, after: Plan) -> None:
    """Raises PlanError for plans of different models: other tensors under another name."""
    a, b = before.inputs.model, after.inputs.model
    if a.inventory != b.inventory and (a.name, a.architecture) != (b.name, b.architecture):
        where = [
            Problem(which, f"{m.name} ({m.architecture}), plan {plan.digest[:12]}")
            for which, m, plan in (("first", a, before), ("second", b, after))
        ]
        raise PlanError("the plans are of different models: there is nothing to compare", where)


class _Kind(msgspec.Struct, frozen=True):
    """What a destination is, but for its place in a parameter. Layouts count from their side."""

    route: Route
    reason: Reason | None
    #: Of the part that is sent: None for a whole tensor.
    part: tuple[int, tuple[int, ...]] | None
    source: Layout
    layout: Layout


class _Side:
    """A plan's tensors by index, with table entries in place of indices."""

    def __init__(self, plan: Plan, known: dict[_Kind, int], geometries: dict[_Geometry, int]):
        self.plan = plan
        self.names = [tensor.name for tensor in plan.tensors]
        layouts = layouts_of(plan)
        self.trainers, self.workers = plan.inputs.trainer.ranks, plan.inputs.engine.workers
        self.sources = [relative(layout, 0) for layout in layouts]
        self.layouts = [relative(layout, self.trainers) for layout in layouts]
        forms = [(plan.dtypes[g.dtype], g.shape) for g in plan.geometries]
        self._forms = forms
        numbers = [geometries.setdefault(form, len(geometries)) for form in forms]
        #: By tensor: a number that both plans share.
        self.geometry = [numbers[tensor.geometry] for tensor in plan.tensors]
        self.kinds: list[tuple[int, ...]] = [()] * len(plan.tensors)
        self.destinations: list[list[PlanDestination]] = [[] for _ in plan.tensors]
        memo: dict[tuple[Hashable, ...], int] = {}
        for d in plan.destinations:
            tensor = plan.tensors[d.tensor]
            key = tensor.geometry, d.wire, d.route, d.layout, d.reason
            if (kind := memo.get(key)) is None:
                kind = known.setdefault(self._kind(tensor.geometry, d), len(known))
                memo[key] = kind
            self.kinds[d.tensor] += (kind,)
            self.destinations[d.tensor].append(d)

    def _kind(self, geometry: int, d: PlanDestination) -> _Kind:
        wire = self.plan.wires[d.wire]
        whole = (wire.base, wire.geometry) == (0, geometry)
        return _Kind(
            d.route,
            None if d.reason is None else self.plan.reasons[d.reason],
            None if whole else (wire.base, self.plan.geometries[wire.geometry].shape),
            self.sources[wire.source],
            self.layouts[d.layout],
        )

    def form(self, tensor: int) -> _Geometry:
        return self._forms[self.plan.tensors[tensor].geometry]

    def size(self, tensor: int) -> int:
        return nbytes(*self.form(tensor))

    def source(self, tensor: int) -> Layout:
        return self.sources[self.plan.tensors[tensor].source]

    def landings(self, tensor: int) -> list[tuple[Hashable, ...]]:
        """(parameter, its form, dims, offsets) of each destination that has a landing."""
        found: list[tuple[Hashable, ...]] = []
        for d in self.destinations[tensor]:
            if d.landing is not None:
                landing = self.plan.landings[d.landing]
                param = self.plan.params[landing.param]
                form = self._forms[param.geometry], param.stride
                found.append((param.name, form, landing.dims, d.offset))
        return found


def compare(before: Plan, after: Plan) -> Difference:
    """What differs, of any two plans. `check_comparable` says whether it is of use."""
    with collector_paused():
        return _Comparison(before, after).difference()


def marks(before: Plan, after: Plan) -> dict[int, tuple[str, ...]]:
    """By the index of each tensor of the second plan that changed: the sections that tell it."""
    with collector_paused():
        return _Comparison(before, after).marks()


class _Comparison:
    def __init__(self, before: Plan, after: Plan) -> None:
        self.plans = before, after
        kinds: dict[_Kind, int] = {}
        geometries: dict[_Geometry, int] = {}
        self.a, self.b = _Side(before, kinds, geometries), _Side(after, kinds, geometries)
        self.kinds = list(kinds)
        self.matches: Matches = match(self.a.names, self.b.names, self.a.geometry, self.b.geometry)
        self.pairs = sorted(self.matches.same + self.matches.renamed, key=lambda pair: pair[1])
        # The tree has every tensor of both once: those of the second, then those removed.
        self.tree = NameTree(self.b.names + [self.a.names[i] for i in self.matches.removed])
        self.before_of = {j: i for i, j in self.pairs}

    def difference(self) -> Difference:
        before, after = self.plans
        a, b, matches = self.a, self.b, self.matches
        one, other = summarize(before), summarize(after)
        received = one.wire_bytes_per_worker, other.wire_bytes_per_worker
        moved = [{r.route: r.nbytes for r in s.routes} for s in (one, other)]
        staging = [max(s.staging_bytes_per_rank) + s.pool_bytes for s in (one, other)]
        amounts = [
            Amount("tensors", one.tensors, other.tensors),
            Amount("model-bytes", one.nbytes, other.nbytes),
            *(
                Amount(f"{route}-bytes", moved[0].get(route, 0), moved[1].get(route, 0))
                for route in ("direct", "reload", "fallback")
            ),
            Amount("wire-bytes", max(received[0]), max(received[1])),
            Amount("staging-bytes", staging[0], staging[1]),
            Amount("collectives", one.collectives, other.collectives),
        ]
        formed = [pair for pair in self.pairs if a.geometry[pair[0]] != b.geometry[pair[1]]]
        shapes = [(i, j) for i, j in formed if a.form(i)[1] != b.form(j)[1]]
        dtypes = [(i, j) for i, j in formed if a.form(i)[0] != b.form(j)[0]]
        changed = [pair for pair in self.pairs if a.kinds[pair[0]] != b.kinds[pair[1]]]
        routes = self._groups(changed, self._route_texts())
        fallback = self._new_fallback()
        return Difference(
            same_program=before.digests.program == after.digests.program,
            model=after.inputs.model.name,
            plans=(before.digest, after.digest),
            programs=(before.digests.program, after.digests.program),
            formats=(_format(before), _format(after)),
            inputs=input_changes(input_paths(before.inputs), input_paths(after.inputs)),
            added=self._alone({j: (None, "added") for j in matches.added}),
            removed=self._alone(
                {len(b.names) + k: ("removed", None) for k in range(len(matches.removed))}
            ),
            renamed=self._renamed(),
            reshaped=self._groups(
                shapes, lambda i, j: (_shape(a.form(i)[1]), _shape(b.form(j)[1]))
            ),
            retyped=self._groups(dtypes, lambda i, j: (a.form(i)[0], b.form(j)[0])),
            routes=routes,
            new_fallback=fallback,
            sources=self._groups(self.pairs, self._source_texts()),
            destinations=self._groups(changed, self._destination_texts()),
            landings=self._landings(),
            stacks=_stacks(before, after),
            reordered=self._reordered(),
            amounts=tuple(amounts),
            wire_bytes_per_worker=received,
            reasons=self._named((*routes, *fallback)),
        )

    def marks(self) -> dict[int, tuple[str, ...]]:
        a, b = self.a, self.b
        found: dict[int, tuple[str, ...]] = dict.fromkeys(self.matches.added, ("added",))
        renamed = {j for _, j in self.matches.renamed}
        routes, sources = self._route_texts(), self._source_texts()
        destinations = self._destination_texts()
        for i, j in self.pairs:
            one, other = a.landings(i), b.landings(j)
            told = {
                "renamed": j in renamed,
                "reshaped": a.form(i)[1] != b.form(j)[1],
                "retyped": a.form(i)[0] != b.form(j)[0],
                "routes": routes(i, j) is not None,
                "sources": sources(i, j) is not None,
                "destinations": destinations(i, j) is not None,
                "landings": one != other and len(one) == len(other),
            }
            if any(told.values()):
                found[j] = tuple(section for section, is_told in told.items() if is_told)
        return dict(sorted(found.items()))

    def _groups(
        self,
        pairs: Sequence[tuple[int, int]],
        texts: Callable[[int, int], _Texts | None],
    ) -> tuple[Group, ...]:
        found = {j: text for i, j in pairs if (text := texts(i, j)) is not None}
        return self._alone(found)

    def _alone(self, texts: dict[int, _Texts]) -> tuple[Group, ...]:
        """Groups of nodes of the tree; a tensor counts with its size in the second plan."""
        return tuple(
            Group(name, len(leaves), sum(map(self._size, leaves)), *texts[leaves[0]])
            for name, leaves in self.tree.groups(texts)
        )

    def _size(self, leaf: int) -> int:
        here = len(self.b.names)
        return self.b.size(leaf) if leaf < here else self.a.size(self.matches.removed[leaf - here])

    def _renamed(self) -> tuple[Group, ...]:
        old = {j: self.a.names[i] for i, j in self.matches.renamed}
        keys = {j: _rename(name, self.b.names[j]) for j, name in old.items()}
        return tuple(
            Group(
                name,
                len(leaves),
                sum(map(self._size, leaves)),
                pattern([old[leaf] for leaf in leaves]),
                name,
            )
            for name, leaves in self.tree.groups(keys)
        )

    def _route_texts(self) -> Callable[[int, int], _Texts | None]:
        memo: dict[tuple[tuple[int, ...], tuple[int, ...]], _Texts | None] = {}

        def routes(kinds: tuple[int, ...]) -> list[tuple[Route, Reason | None]]:
            each = ((self.kinds[kind].route, self.kinds[kind].reason) for kind in kinds)
            return list(dict.fromkeys(sorted(each, key=str)))

        def texts(i: int, j: int) -> _Texts | None:
            key = self.a.kinds[i], self.b.kinds[j]
            if key not in memo:
                one, other = routes(key[0]), routes(key[1])
                before, after = (" + ".join(_route(*r) for r in side) for side in (one, other))
                if before == after:  # another wording of a reason
                    before, after = (
                        " + ".join(f"{route} ({reason.text})" for route, reason in side if reason)
                        for side in (one, other)
                    )
                memo[key] = None if one == other else (before, after)
            return memo[key]

        return texts

    def _new_fallback(self) -> tuple[Group, ...]:
        falls = [any(self.kinds[k].route == "fallback" for k in kinds) for kinds in self.b.kinds]
        found: dict[int, _Texts] = {}
        for j, now in enumerate(falls):
            if not now:
                continue
            # That another tensor of its geometry fell back, elsewhere, is no excuse.
            i = None if j in self.matches.moved else self.before_of.get(j)
            before = () if i is None else self.a.kinds[i]
            if all(self.kinds[k].route != "fallback" for k in before):
                found[j] = (
                    " + ".join(sorted({self.kinds[k].route for k in before})) or None,
                    " + ".join(
                        sorted(
                            {
                                _route(self.kinds[k].route, self.kinds[k].reason)
                                for k in self.b.kinds[j]
                            }
                        )
                    ),
                )
        return self._alone(found)

    def _source_texts(self) -> Callable[[int, int], _Texts | None]:
        def text(side: _Side, layout: Layout) -> str:
            return layout_text(layout, side.trainers, "trainer rank")

        def parts(kinds: tuple[int, ...]) -> list[tuple[object, Layout]]:
            each = (self.kinds[kind] for kind in kinds)
            return [(kind.part, kind.source) for kind in each if kind.part is not None]

        memo: dict[Hashable, _Texts | None] = {}

        def texts(i: int, j: int) -> _Texts | None:
            one, other = self.a.source(i), self.b.source(j)
            if one == other and self.a.kinds[i] == self.b.kinds[j]:
                return None
            key = one, other, self.a.kinds[i], self.b.kinds[j]
            if key not in memo:
                before, after = text(self.a, one), text(self.b, other)
                if one != other:
                    memo[key] = pair_text(before, after, _moved(one, other))
                elif dict(parts(key[2])).keys() == dict(parts(key[3])).keys() and (
                    parts(key[2]) != parts(key[3])
                ):
                    memo[key] = before, f"{after}, parts of it as another mesh"
                else:
                    memo[key] = None
            return memo[key]

        return texts

    def _destination_texts(self) -> Callable[[int, int], _Texts | None]:
        memo: dict[tuple[tuple[int, ...], tuple[int, ...]], _Texts | None] = {}

        def where(kinds: tuple[int, ...]) -> list[tuple[object, Layout]]:
            return [(self.kinds[kind].part, self.kinds[kind].layout) for kind in kinds]

        def text(kinds: tuple[int, ...], workers: int) -> str:
            each = Counter(
                ("" if part is None else f"part {_shape(part[1])} from {part[0]} ")
                + layout_text(layout, workers, "worker")
                for part, layout in (
                    (self.kinds[kind].part, self.kinds[kind].layout) for kind in kinds
                )
            )
            return " + ".join(
                f"{count} x {what}" if count > 1 else what for what, count in each.items()
            )

        def texts(i: int, j: int) -> _Texts | None:
            key = self.a.kinds[i], self.b.kinds[j]
            if key not in memo:
                one, other = where(key[0]), where(key[1])
                same = one == other
                if not same:
                    ranks = [
                        {(w.mesh.start, w.mesh.size) for _, w in side} for side in (one, other)
                    ]
                    moved = "on other workers" if ranks[0] != ranks[1] else "as another mesh"
                memo[key] = (
                    None
                    if same
                    else pair_text(
                        text(key[0], self.a.workers), text(key[1], self.b.workers), moved
                    )
                )
            return memo[key]

        return texts

    def _landings(self) -> tuple[Group, ...]:
        """Where shards go elsewhere; a route that gains or loses its landing is told as such."""
        aspects: dict[int, set[str]] = {}
        renamed: dict[int, tuple[str, str]] = {}
        for i, j in self.pairs:
            one, other = self.a.landings(i), self.b.landings(j)
            if one == other or len(one) != len(other):
                continue
            found = {
                aspect
                for x, y in zip(one, other, strict=True)
                for aspect, was, now in zip(_ASPECTS, x, y, strict=True)
                if was != now
            }
            if found == {_ASPECTS[0]}:
                names = ([str(landing[0]) for landing in side] for side in (one, other))
                before, after = (numberless(", ".join(side)) for side in names)
                if before != after:
                    renamed[j] = before, after
                    continue
            aspects[j] = found
        groups = [
            Group(
                name,
                len(leaves),
                sum(map(self._size, leaves)),
                None,
                "another " + ", ".join(a for a in _ASPECTS if any(a in aspects[k] for k in leaves)),
            )
            for name, leaves in self.tree.groups(dict.fromkeys(aspects, True))
        ]
        return (*self._alone(dict(renamed)), *groups)

    def _reordered(self) -> bool:
        place = {i: j for i, j in self.pairs}
        orders = []
        for side, index in ((self.a, place), (self.b, {j: j for j in place.values()})):
            sent = (
                side.plan.destinations[d].tensor
                for transfer in side.plan.transfers
                for d in transfer.destinations
            )
            orders.append([index[t] for t in dict.fromkeys(sent) if t in index])
        return orders[0] != orders[1]

    def _named(self, groups: Sequence[Group]) -> tuple[Reason, ...]:
        """The reasons whose codes the groups name."""
        said = " ".join(text for group in groups for text in (group.before, group.after) if text)
        reasons = dict.fromkeys((*self.plans[0].reasons, *self.plans[1].reasons))
        return tuple(reason for reason in reasons if f"({reason.code})" in said)


def _route(route: Route, reason: Reason | None) -> str:
    return route if reason is None else f"{route} ({reason.code})"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _format(plan: Plan) -> str:
    return f"{plan.format.major}.{plan.format.minor}"


def _moved(one: Layout, other: Layout) -> str:
    same = (one.mesh.start, one.mesh.size) == (other.mesh.start, other.mesh.size)
    return "as another mesh" if same else "on other ranks"


def _rename(old: str, new: str) -> tuple[str, str]:
    """What of a name is replaced by what, without what both begin and end with."""
    a, b = old.split("."), new.split(".")
    start, most = 0, min(len(a), len(b))
    while start < most and a[start] == b[start]:
        start += 1
    end = 0
    while end < most - start and a[-1 - end] == b[-1 - end]:
        end += 1
    was, now = (
        ".".join("{}" if part.isdecimal() else part for part in parts[start : len(parts) - end])
        for parts in (a, b)
    )
    return was, now


def _stacks(before: Plan, after: Plan) -> tuple[Stacks, ...]:
    a, b = (Counter(len(t.destinations) for t in plan.transfers) for plan in (before, after))
    return tuple(Stacks(size, a[size], b[size]) for size in sorted(a | b) if a[size] != b[size])
