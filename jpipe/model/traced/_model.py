"""A whole model that was traced and cut: its layers, and conversions between their arrays and the arrays of the whole model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jpipe.errors import InputError
from jpipe.model._layer import Layer, describe, key_spec, spec_of
from jpipe.model._ties import ModelTree, Tie
from jpipe.model.jaxprs._wanted import evaluate_wanted
from jpipe.model.traced._blocks import Path
from jpipe.model.traced._chain import Chain
from jpipe.model.traced._cuts import Granularity, choose_cuts, position_before, same_cuts
from jpipe.model.traced._names import CutLayer, parts_of, paths_in
from jpipe.model.traced._segments import Segment, segments_of
from jpipe.model.traced._trace_model import Leaves, Trace, context, paths_of, stacked, trace_model
from jpipe.model.traced.flat._flatten import Leaf, take_slice
from jpipe.model.traced.frontends._whole import Whole

Tree = Any


@dataclass(frozen=True)
class _Cut:
    """The segments of a model for inputs of some shapes."""

    segments: Mapping[bool, Sequence[Segment]]  # the segments in training (True) and in evaluation (False)
    # for each layer the specs of the values that pass before it, in training or in evaluation
    carries: Sequence[tuple[jax.ShapeDtypeStruct, ...]]
    # for each layer the positions of its segment's inputs in its carry, in training and in evaluation
    slots: Mapping[bool, Sequence[tuple[int, ...]]]
    # a function that builds the model's outputs from the outputs of the last segment, in training and in evaluation
    outputs: Mapping[bool, Callable[[Sequence[Any]], Tree]]
    # for each layer the number of the first layer with the same computation; the values of their parameters may differ
    equal: tuple[int, ...] = ()


@dataclass(frozen=True)
class TracedModel:
    """A whole model, cut into layers."""

    whole: Whole  # the model as one layer
    inputs: Tree  # the specs of the inputs of the first trace
    parts: tuple[CutLayer, ...]  # its layers
    chain: Chain  # the chain of the first trace, in training
    positions: tuple[int, ...]  # the positions where `chain` is cut
    leaves: Leaves  # its parameters and layer state
    owners: tuple[int, ...]  # for each leaf the number of the first layer that has it, or of the layer that writes it
    draws: Mapping[bool, Sequence[bool]]  # for each layer whether it draws random numbers, in training (True) and in evaluation (False)
    prepare: Callable[[Tree], Tree]  # a function that casts the parameters of a layer before its equations run
    abstract: InputError | None  # the error for a model that has no parameters and cannot initialize them
    _cuts: dict[Any, _Cut] = field(default_factory=dict, compare=False)
    _traces: dict[Any, Trace] = field(default_factory=dict, compare=False)
    _inputs_of: dict[Any, Tree] = field(default_factory=dict, compare=False)

    def recut(self, change: Callable[[Layer], Layer], prepare: Callable[[Tree], Tree]) -> "TracedModel":
        """Return a copy of the model with a changed whole layer, cut at the same places."""
        whole = replace(self.whole, layer=change(self.whole.layer))
        return replace(self, whole=whole, prepare=prepare, _cuts={}, _traces={}, _inputs_of={})

    @property
    def fresh(self) -> bool:
        """Whether layers initialize their parameters. If not, the user gives the arrays, and layers initialize zeros."""
        return self.whole.params is None and self.abstract is None

    # Layers --------------------------------------------------------------------------------------------------------------

    def layers(self) -> dict[str, Layer]:
        """Return the layers by id."""
        return {
            part.id: Layer(
                partial(self._init, k),
                partial(self._apply, k),
                self.draws[True][k],
                draws_in_evaluation=self.draws[False][k],
                axes=self._axes(part),
                of_model=True,
            )
            for k, part in enumerate(self.parts)
        }

    def ties(self) -> list[Tie]:
        """Return the ties, for each parameter that several layers read."""
        places = [{leaf: (part.id, path) for leaf, path in paths_in(part.params).items()} for part in self.parts]
        return [
            Tie(places[self.owners[leaf]][leaf], place)
            for k, by_leaf in enumerate(places)
            for leaf, place in by_leaf.items()
            if self.owners[leaf] != k
        ]

    def tree(self) -> ModelTree:
        """Return the tree of the model's own parameters."""
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(self.whole.specs[0]))
        layers = {part.id: jax.tree.map(lambda number: self.leaves.leaves[number], part.params) for part in self.parts}
        return ModelTree(self.whole.structures, shapes, layers)

    def first_equal(self, layer_id: str, x: Tree) -> str:
        """Return the first layer with the same computation for the input `x`; the values of their parameters may differ."""
        k = next(k for k, part in enumerate(self.parts) if part.id == layer_id)
        return self.parts[self._cut_of(k, x).equal[k]].id

    def _equal(self, cut: _Cut) -> tuple[int, ...]:
        first: dict[Any, int] = {}
        equal = []
        for k, part in enumerate(self.parts):
            texts = tuple((cut.segments[train][k].text, cut.slots[train][k]) for train in (True, False))
            equal.append(first.setdefault((*texts, cut.carries[k], str(jax.tree.structure((part.params, part.state)))), k))
        return tuple(equal)

    def _axes(self, part: CutLayer) -> dict[str, tuple[str | None, ...]]:
        axes = {}
        for leaf, path in paths_in(part.params).items():
            place = self.leaves.leaves[leaf]
            names = self.whole.layer.axes.get("/".join(self._whole_paths[place.number]), ())
            kept = tuple(name for axis, name in enumerate(names) if axis not in place.axes)
            if any(kept):
                axes[path] = kept
        return axes

    @cached_property
    def _whole_paths(self) -> list[Path]:
        params, state = self.whole.specs
        return [*paths_of(params), *paths_of(state)]

    def _init(self, k: int, key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        """Return the parameters and state of one layer; no other arrays of the model are computed."""
        numbers, treedef = jax.tree.flatten((self.parts[k].params, self.parts[k].state))
        places = [self.leaves.leaves[number] for number in numbers]
        if not self.fresh:
            specs = jax.tree.leaves(self.whole.specs)
            slices = [jnp.zeros(self.leaves.shapes[number], specs[self.leaves.leaves[number].number].dtype) for number in numbers]
        else:
            inputs = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self.inputs)]
            closed, wanted = self._initializer, {place.number for place in places}
            flags = [number in wanted for number in range(len(closed.jaxpr.outvars))]
            values = evaluate_wanted(closed.jaxpr, closed.consts, [key, *inputs], flags)
            slices = [take_slice(place, values[place.number]) for place in places]
        params, state = jax.tree.unflatten(treedef, slices)
        return params, state

    @cached_property
    def _initializer(self) -> Any:
        return jax.make_jaxpr(lambda key, x: jax.tree.leaves(self.whole.layer.init(key, x)))(key_spec(), self.inputs)

    def _apply(self, k: int, params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        cut = self._cut_of(k, x)
        segment, (param_numbers, state_numbers) = cut.segments[train][k], self.parts[k].numbers()
        values = dict(zip(param_numbers, jax.tree.leaves(self.prepare(params)), strict=True))
        state_leaves, state_def = jax.tree.flatten(state)
        values |= dict(zip(state_numbers, state_leaves, strict=True))
        carry = jax.tree.leaves(x)
        if segment.uses_key and key is None:
            key = jax.random.key(0)  # a dummy: nothing random is drawn
        given, written = segment([values[leaf] for leaf in segment.leaves], key, [carry[slot] for slot in cut.slots[train][k]])
        values |= dict(zip(segment.written, written, strict=True))
        new_state = jax.tree.unflatten(state_def, [values[number] for number in state_numbers]) if train else state
        if k == len(self.parts) - 1:
            return cut.outputs[train](given), new_state
        filled = dict(zip(cut.slots[train][k + 1], given, strict=True))
        carry = [filled[i] if i in filled else jnp.zeros(spec.shape, spec.dtype) for i, spec in enumerate(cut.carries[k + 1])]
        return carry[0] if len(carry) == 1 else tuple(carry), new_state

    # Traces --------------------------------------------------------------------------------------------------------------

    def _cut_of(self, k: int, x: Tree) -> _Cut:
        """Return the cut for inputs of the model with which this layer gets `x`."""
        spec = jax.tree.map(spec_of, x)
        if k == 0:
            return self._cut(spec)
        known = self._inputs_of.get((k, *_hashable(spec)))
        if known is None:
            raise InputError(
                f"layer '{self.parts[k].id}': its input {describe(spec)} does not come from any inputs of the model that were seen before; "
                "run the model from its first layer once with inputs of these shapes, as LayerStack.specs does"
            )
        return self._cut(known)

    def _cut(self, inputs: Tree) -> _Cut:
        key = (*_hashable(inputs), *context())
        if key not in self._cuts:
            self._cuts[key] = cut = self._make_cut(inputs)
            for k, carry in enumerate(cut.carries):
                leaves = inputs if k == 0 else carry[0] if len(carry) == 1 else carry
                first = self._inputs_of.setdefault((k, *_hashable(leaves)), inputs)
                self._check_equal(k, cut, self._cuts.get((*_hashable(first), *context()), cut))
        return self._cuts[key]

    def _check_equal(self, k: int, cut: _Cut, other: _Cut) -> None:
        """Check that a layer has the same computation in both cuts if its inputs have the same shapes in both."""
        if any(cut.segments[train][k].text != other.segments[train][k].text for train in (True, False)):
            raise InputError(
                f"layer '{self.parts[k].id}' gets inputs of the same shapes for model inputs of two shapes, but its computation differs, "
                "for example in a division by a length",
                where="from_model",
                change="compute this length from an array that passes to the layer",
            )

    def _make_cut(self, inputs: Tree) -> _Cut:
        traces = {train: self._trace(inputs, train) for train in (True, False)}
        segments = _segments(traces, self.chain, self.positions, lambda: [part.id for part in self.parts])
        cut = _joined(segments, {train: trace.outputs for train, trace in traces.items()})
        return replace(cut, equal=self._equal(cut))

    def _trace(self, inputs: Tree, train: bool) -> Trace:
        key = (*_hashable(inputs), train, *context())
        if key not in self._traces:
            trace = trace_model(self.whole, self.prepare, inputs, train, self.leaves.axes)
            if trace.leaves != self.leaves:
                raise InputError(
                    "the model has other parameters or layer state for inputs of other shapes",
                    where="from_model",
                    change="give such inputs first",
                )
            self._traces[key] = trace
        return self._traces[key]

    # The arrays of the whole model ---------------------------------------------------------------------------------------

    def by_layer(self, params: Tree, state: Tree) -> dict[str, tuple[Tree, Tree]]:
        """Return the parameters and state of each layer from those for the whole model; either tree, and any leaf, may be None."""
        trees = (
            jax.tree.map(lambda _: None, spec) if tree is None else tree
            for spec, tree in zip(self.whole.specs, (params, state), strict=True)
        )
        filled = jax.tree.map(lambda spec, leaf: spec if leaf is None else leaf, self.whole.specs, tuple(trees))
        return jax.tree.map(lambda leaf: None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, self.split(*filled))

    def split(self, params: Tree, state: Tree) -> dict[str, tuple[Tree, Tree]]:
        """Return the parameters and the state of each layer from the parameters and state of the whole model.

        A parameter that several layers read is returned only for the first one. Parameters without arrays (`jax.ShapeDtypeStruct`s) are
        left out. Slices of stacked arrays are made on the host.
        """
        leaves = [*jax.tree.leaves(params), *jax.tree.leaves(state)]
        slices = {number: self._slice(leaves, number) for number in range(len(self.leaves.leaves))}
        kept = {leaf: owner for leaf, owner in enumerate(self.owners) if not isinstance(slices[leaf], jax.ShapeDtypeStruct)}
        by_layer = {}
        for k, part in enumerate(self.parts):
            own = {path: slices[leaf] for path, leaf in flatten_dict(part.params).items() if kept.get(leaf) == k}
            by_layer[part.id] = unflatten_dict(own), jax.tree.map(slices.__getitem__, part.state)
        return by_layer

    def _slice(self, leaves: Sequence[Any], number: int) -> Any:
        leaf = self.leaves.leaves[number]
        array = leaves[leaf.number]
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.leaves.shapes[number], array.dtype)
        return take_slice(leaf, np.asarray(array)) if leaf.axes else array

    def places(self) -> dict[str, dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]]:
        """Return the place in the whole model of each array of the layers, in a dict for "params" and one for "state".

        Each maps "layer id/path" to (path in the whole model, index, axes). Index and axes say which slice of a stacked array it is; both
        are `()` for a whole array. An array that several layers have is listed for only one of these layers.
        """
        places: dict[str, dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]] = {"params": {}, "state": {}}
        for k, part in enumerate(self.parts):
            for kind, tree in (("params", part.params), ("state", part.state)):
                for number, path in paths_in(tree).items():
                    leaf = self.leaves.leaves[number]
                    if self.owners[number] == k:
                        whole = "/".join(self._whole_paths[leaf.number])
                        places[kind][f"{part.id}/{path}"] = whole, leaf.index, leaf.axes
        return places

    def join(self, params: Mapping[str, Tree], state: Mapping[str, Tree]) -> tuple[Tree, Tree]:
        """Return the parameters and the layer state of the whole model from the arrays of its layers, both by layer id.

        Leaves of the whole model that no layer has are `jax.ShapeDtypeStruct`s.
        """
        specs, treedef = jax.tree.flatten(self.whole.specs)
        slices: list[dict[Leaf, Any]] = [{} for _ in specs]
        for k, part in enumerate(self.parts):
            for numbers, trees in zip(part.numbers(), (params, state), strict=True):
                for number, array in zip(numbers, jax.tree.leaves(trees[part.id]), strict=True) if part.id in trees else ():
                    if self.owners[number] == k:
                        slices[self.leaves.leaves[number].number][self.leaves.leaves[number]] = array
        joined: tuple[Tree, Tree] = jax.tree.unflatten(treedef, list(map(stacked, specs, slices)))
        return joined


def _hashable(tree: Tree) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def _segments(
    traces: Mapping[bool, Trace], like: Chain, positions: Sequence[int], ids: Callable[[], Sequence[str]]
) -> dict[bool, list[Segment]]:
    """Return the segments of traces in training (True) and in evaluation, cut where `like` is cut at these positions."""
    cuts = {train: same_cuts(trace.chain, like, positions, ids, trace.leaves.names) for train, trace in traces.items()}
    evaluation = segments_of(traces[False].chain, cuts[False])
    return {True: segments_of(traces[True].chain, cuts[True], evaluation), False: evaluation}


def _joined(segments: Mapping[bool, Sequence[Segment]], outputs: Mapping[bool, Callable[[Sequence[Any]], Tree]]) -> _Cut:
    """Return the cut; its carries hold the values that pass in training and the values that pass in evaluation."""
    carries, slots = [], {True: list[tuple[int, ...]](), False: list[tuple[int, ...]]()}
    for training, evaluation in zip(segments[True], segments[False], strict=True):
        carry, free, positions = list(training.takes), list(range(len(training.takes))), []
        for spec in evaluation.takes:
            slot = next((i for i in free if carry[i] == spec), None)
            if slot is None:
                slot = len(carry)
                carry.append(spec)
            else:
                free.remove(slot)
            positions.append(slot)
        carries.append(tuple(carry))
        slots[True].append(tuple(range(len(training.takes))))
        slots[False].append(tuple(positions))
    return _Cut(segments, carries, slots, outputs)


def cut_model(whole: Whole, inputs: Tree, granularity: Granularity, prefixes: Sequence[str]) -> TracedModel:
    """Trace a whole model for inputs of these specs and cut it into layers. Raise InputError if either is impossible."""
    abstract = None
    if whole.params is None:
        try:
            jax.eval_shape(whole.layer.init, key_spec(), inputs)
        except InputError as error:  # the message says how to initialize the model
            abstract = error
    training = trace_model(whole, _as_is, inputs, True, {})
    chain, leaves = training.chain, training.leaves
    evaluation = trace_model(whole, _as_is, inputs, False, leaves.axes)
    if evaluation.leaves != leaves:  # evaluation splits more stacked arrays than training does
        training = trace_model(whole, _as_is, inputs, True, evaluation.leaves.axes)
        chain, leaves = training.chain, training.leaves
    positions = choose_cuts(chain, leaves.paths[: leaves.num_params], granularity, prefixes)
    if not positions:
        raise InputError(
            where="from_model",
            expected="a model of several modules with parameters",
            found="no place between two of them",
            change="if the whole model is in one jax.checkpoint or loop, put each part into its own, or name places to cut with cuts=… or "
            "jpipe.cut",
        )
    named = {k: chain.marks[position] for k, position in enumerate(positions) if position in chain.marks}
    prefix_at = {position_before(chain, leaves.paths, prefix): prefix for prefix in prefixes}
    named |= {k + 1: prefix_at[position] for k, position in enumerate(positions) if position in prefix_at}

    def ids() -> list[str]:
        read = [{*segment.leaves, *segment.written} for segment in segments_of(chain, positions)]
        return [part.id for part in parts_of(read, leaves, named)]

    segments = _segments({True: training, False: evaluation}, chain, positions, ids)
    pairs = zip(segments[True], segments[False], strict=True)
    read = [{*segment.leaves, *segment.written, *evaluated.leaves} for segment, evaluated in pairs]
    writers = {leaf: k for k, segment in enumerate(segments[True]) for leaf in segment.written}
    for k, (each, segment) in enumerate(zip(read, segments[True], strict=True)):
        if stale := sorted(writers.keys() & each - {*segment.written}):
            raise InputError(
                f"layer '{ids()[k]}' reads the layer state '{leaves.names[stale[0]]}', which another layer changes, so its "
                "copy would be out of date",
                where="from_model",
                change="cut elsewhere (cuts=…, jpipe.cut), so that one layer reads and changes it",
            )
    parts = parts_of(read, leaves, named)
    having = {leaf: k for k, part in reversed([*enumerate(parts)]) for leaf in jax.tree.leaves((part.params, part.state))} | writers
    owners = tuple(having[leaf] for leaf in range(len(leaves.leaves)))
    draws = {train: [segment.uses_key for segment in each] for train, each in segments.items()}
    traced = TracedModel(whole, inputs, parts, chain, positions, leaves, owners, draws, _as_is, abstract)
    if evaluation.leaves == leaves:
        traced._traces.update({(*_hashable(inputs), train, *context()): trace for train, trace in ((True, training), (False, evaluation))})
    return traced


def _as_is(params: Tree) -> Tree:
    return params
