"""The sharding of a stage's arrays over the mesh of each of its workers, without devices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.tree_util import keystr

from jpipe._frozen import NOTHING, FrozenMapping
from jpipe.context import StageMesh
from jpipe.errors import InputError, nearest
from jpipe.model._layer import LayerSpec
from jpipe.model._stack import LayerStack
from jpipe.plan import Plan, Stage, mesh_rules

Tree = Any
Axes = Mapping[str, tuple[str | None, ...]]
WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Partition:
    """The sharding of a stage's arrays over its mesh."""

    # the sizes of the mesh axes, by name, without axes of size 1. Empty: one device, which holds all arrays.
    mesh: FrozenMapping[int] = NOTHING
    rows: int = 0  # the number of rows of a microbatch
    batch: tuple[str, ...] = ()  # the mesh axes over which the rows are sharded
    # the `PartitionSpec` of each stored parameter, by entry and path; parameters that each device has whole are left out
    params: Mapping[str, Mapping[str, PartitionSpec]] = field(default_factory=dict)
    # the `PartitionSpec` of each parameter in use, by entry and path, without the axis of the rows that `fsdp` adds
    gathered: Mapping[str, Mapping[str, PartitionSpec]] = field(default_factory=dict)
    axes: Mapping[str, str] = field(default_factory=dict)  # for each logical axis that is sharded, the mesh axis that shards it

    @property
    def traced(self) -> StageMesh | None:
        """The mesh that layers get while they are traced; None for one device."""
        return StageMesh(without_devices(self.mesh), self.axes, self.batch) if self.mesh else None

    def gather(self, params: Tree) -> Tree:
        """Inside a program, return the parameters in use, by entry: with `fsdp` they are gathered over the axis of the rows."""
        if self.gathered == self.params:
            return params
        mesh = without_devices(self.mesh)

        def gathered(entry: str, path: str, leaf: Any) -> Any:
            if self._spec(self.gathered, entry, path) == self._spec(self.params, entry, path):
                return leaf
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, self._spec(self.gathered, entry, path)))

        return {entry: _map_paths(lambda path, leaf, entry=entry: gathered(entry, path, leaf), tree) for entry, tree in params.items()}

    def of_params(self, params: Tree) -> Tree:
        """Return a `PartitionSpec` for each parameter, by entry; `params` may be any tree with the structure of the parameters."""
        return {
            entry: _map_paths(lambda path, _, entry=entry: self._spec(self.params, entry, path), tree) for entry, tree in params.items()
        }

    def sums_late(self, params: Tree) -> Tree:
        """Return for each parameter, by entry, whether its gradients are added up over the devices of the rows once per update.

        They are not if these devices have different parts of the parameter, as with `fsdp`: each backward scatters the sums to them.
        """

        def is_late(spec: PartitionSpec) -> bool:
            return bool(self.batch) and axes_in(spec).isdisjoint(self.batch)

        return jax.tree.map(is_late, self.of_params(params), is_leaf=lambda spec: isinstance(spec, PartitionSpec))

    def of_optimizer(self, optimizer: Tree, params: Tree) -> Tree:
        """Return a `PartitionSpec` for each array of the optimizer state, by entry, from the parameter with the same name and shape."""
        return {entry: self._like_params(entry, optimizer[entry], params[entry]) for entry in optimizer}

    def flow(self, tree: Tree) -> Tree:
        """Return a `PartitionSpec` for each array between stages. The first dim is sharded if it is the rows."""
        over = WHOLE if not self.batch else PartitionSpec(self.batch if len(self.batch) > 1 else self.batch[0])
        return jax.tree.map(lambda leaf: over if leaf.ndim and leaf.shape[0] == self.rows else WHOLE, tree)

    def _spec(self, specs: Mapping[str, Mapping[str, PartitionSpec]], entry: str, path: str) -> PartitionSpec:
        return specs.get(entry, {}).get(path, WHOLE)

    def _like_params(self, entry: str, state: Tree, params: Tree) -> Tree:
        """Return `of_optimizer` for one entry. Optax keeps trees like the parameters, so an array's path ends with a parameter's path."""
        shapes = {path: leaf.shape for path, leaf in _paths(params)}

        def spec(path: str, leaf: Any) -> PartitionSpec:
            parts = path.split("/")
            for start in range(len(parts) + 1):
                name = "/".join(parts[start:])
                if shapes.get(name) == leaf.shape:
                    return self._spec(self.params, entry, name)
            return WHOLE

        return _map_paths(spec, state)


ONE_DEVICE = Partition()


class _Parameter(NamedTuple):
    """The place of a parameter in the model: layer id and path."""

    layer_id: str
    path: str

    def __str__(self) -> str:
        return f"layer '{self.layer_id}': parameter '{self.path}'" if self.path else f"layer '{self.layer_id}': the parameter"


def partitions(plan: Plan, stack: LayerStack, layers: Mapping[str, LayerSpec], rows: int) -> tuple[Partition, ...]:
    """Return the partition of each stage for microbatches of `rows` rows."""
    meshes = [stage.shape for stage in plan.stages]
    if not any(meshes) and not plan.param_axes:
        return (ONE_DEVICE,) * plan.depth
    axes = {layer_id: _axes_of(plan, layer_id, spec) for layer_id, spec in layers.items()}
    _check_matched(plan, axes, layers)
    of_stages = tuple(
        _partition(plan, stage, mesh, stack, layers, axes, rows) if mesh else ONE_DEVICE
        for stage, mesh in zip(plan.stages, meshes, strict=True)
    )
    _check_used(plan, of_stages)
    return of_stages


def _partition(
    plan: Plan,
    stage: Stage,
    mesh: FrozenMapping[int],
    stack: LayerStack,
    layers: Mapping[str, LayerSpec],
    axes: Mapping[str, Axes],
    rows: int,
) -> Partition:
    rules = mesh_rules(plan)
    data, batch = rules["batch"] if rules["batch"] in mesh else None, _axes_of_rows(rules, mesh, axes)
    if rows % (size := math.prod(mesh[axis] for axis in batch)):
        over = f"axis '{batch[0]}'" if len(batch) == 1 else f"axes {' and '.join(map(repr, batch))}"
        raise InputError(
            f"batch: expected a multiple of {size} rows in a microbatch, because the mesh of layer '{stage.layers[0]}' divides rows over "
            f"the {over} (size {size}), found {rows}; change the batch size, the number of microbatches or the mesh"
        )
    params: dict[str, dict[str, PartitionSpec]] = {}
    gathered: dict[str, dict[str, PartitionSpec]] = {}
    for entry, parameters in _entries(stack, stage.layers, layers).items():
        for path, (parameter, spec) in parameters.items():
            in_use = _sharded(parameter, spec, axes[parameter.layer_id].get(parameter.path), rules, mesh)
            stored = _over_rows(in_use, spec, mesh, data) if stage.fsdp and data is not None else in_use
            if stored != WHOLE:
                params.setdefault(entry, {})[path] = stored
            if in_use != WHOLE:
                gathered.setdefault(entry, {})[path] = in_use
    return Partition(mesh, rows, batch, params, gathered, {name: axis for name, axis in rules.items() if axis is not None and axis in mesh})


def _axes_of_rows(rules: Mapping[str, str | None], mesh: Mapping[str, int], axes: Mapping[str, Axes]) -> tuple[str, ...]:
    """Return the axes of a mesh over which the rows of a microbatch are sharded.

    These are the mesh axis of `batch` and, if a parameter has the logical axis `expert`, the mesh axis of experts, unless another logical
    axis also uses that. With both, each device computes a part of the rows in all other layers, and experts get their tokens from all
    devices.
    """
    over, experts = [rules["batch"]], rules["expert"]
    others = [axis for name, axis in rules.items() if name not in ("batch", "expert")]
    if experts not in (*over, *others) and any("expert" in names for of_layer in axes.values() for names in of_layer.values()):
        over.append(experts)
    return tuple(axis for axis in over if axis is not None and axis in mesh)


def _entries(stack: LayerStack, ids: Sequence[str], layers: Mapping[str, LayerSpec]) -> dict[str, dict[str, tuple[_Parameter, Any]]]:
    """Return, by entry and path, the place of each of the stage's parameters in the model, and its spec."""
    fresh = stack.ties.split({layer_id: spec.params for layer_id, spec in layers.items()}, ids)
    parameters: dict[str, dict[str, tuple[_Parameter, Any]]] = {}
    for entry, tree in fresh.items():
        first = _Parameter(*stack.ties.first[entry]) if entry in stack.ties.first else None
        parameters[entry] = {path: (first or _Parameter(entry, path), leaf) for path, leaf in _paths(tree)}
    return parameters


def _axes_of(plan: Plan, layer_id: str, spec: LayerSpec) -> dict[str, tuple[str | None, ...]]:
    """Return the logical axes of a layer's parameters: from the first matching pattern, or from the layer itself if none matches."""
    axes_by_path = dict(spec.axes)
    for path, _ in _paths(spec.params):
        for pattern, axes in plan.param_axes.items():
            if fnmatchcase(f"{layer_id}/{path}", pattern):
                axes_by_path[path] = axes
                break
    return axes_by_path


def _sharded(
    parameter: _Parameter, spec: Any, axes: tuple[str | None, ...] | None, rules: Mapping[str, str | None], mesh: Mapping[str, int]
) -> PartitionSpec:
    """Return the `PartitionSpec` of a parameter from its logical axes."""
    if axes is None:
        return WHOLE
    if len(axes) != len(spec.shape):
        raise InputError(where=parameter, expected=f"a logical axis or None for each dim, {list(spec.shape)}", found=list(axes))
    over: list[str | None] = []
    for dim, name in enumerate(axes):
        if name is not None and name not in rules:
            known, rule = ", ".join(f"'{logical}'" for logical in rules), {name: name if name in mesh else None}
            raise InputError(
                f"{parameter}: expected logical axes that the rules name, {known}, found '{name}'; add a rule for it, such as {rule}"
            )
        axis = None if name is None else rules[name]
        axis = axis if axis in mesh else None
        if axis is not None and axis in over:
            raise InputError(
                f"{parameter}: dims {over.index(axis)} and {dim} would both be sharded over '{axis}', found logical axes {list(axes)}; "
                f"give one of these logical axes the rule None"
            )
        if axis is not None and spec.shape[dim] % mesh[axis]:
            raise InputError(
                f"{parameter}: dim {dim}, '{name}', is {spec.shape[dim]}, which the size {mesh[axis]} of the axis '{axis}' does not "
                f"divide; use a mesh of another size, or the rule {{'{name}': None}}"
            )
        over.append(axis)
    return _trimmed(over)


def _over_rows(in_use: PartitionSpec, spec: Any, mesh: Mapping[str, int], batch: str) -> PartitionSpec:
    """Shard over the axis of the rows the largest unsharded dim that it divides, if there is one."""
    over = [*in_use, *[None] * (len(spec.shape) - len(in_use))]
    free = [dim for dim, axis in enumerate(over) if axis is None and spec.shape[dim] and spec.shape[dim] % mesh[batch] == 0]
    if batch not in over and free:
        over[max(free, key=lambda dim: spec.shape[dim])] = batch
    return _trimmed(over)


def _trimmed(over: Sequence[str | None]) -> PartitionSpec:
    """Return a `PartitionSpec` without the Nones at the end."""
    last = max((dim for dim, axis in enumerate(over) if axis is not None), default=-1)
    return PartitionSpec(*over[: last + 1])


def _check_matched(plan: Plan, axes: Mapping[str, Axes], layers: Mapping[str, LayerSpec]) -> None:
    """Check that each pattern matches a parameter, and that the model has the logical axis of each rule."""
    names = [f"{layer_id}/{path}" for layer_id, spec in layers.items() for path, _ in _paths(spec.params)]
    for pattern in plan.param_axes:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"'{pattern}' matches no parameter of the model", where="param_axes", change=nearest(pattern, names))
    logical = {"batch", *(name for of_layer in axes.values() for over in of_layer.values() for name in over if name is not None)}
    for name in plan.rules:
        if name not in logical:
            raise InputError(
                f"no parameter of the model has the logical axis '{name}'", where="rules", change=nearest(name, sorted(logical))
            )


def _check_used(plan: Plan, of_stages: Sequence[Partition]) -> None:
    """Check that each axis of a mesh shards an array of some stage."""
    for axis in dict.fromkeys(axis for partition in of_stages for axis in partition.mesh):
        specs = [spec for partition in of_stages for tree in partition.params.values() for spec in tree.values()]
        if not any(axis in spec for spec in specs) and not any(axis in partition.batch for partition in of_stages):
            raise InputError(
                f"nothing is sharded over the axis '{axis}' of the meshes: no layer names logical axes with a rule for it",
                where="plan",
                change="name them in the modules (nnx.with_partitioning, linen.with_partitioning) or in param_axes, or leave out the axis",
            )


def _paths(tree: Tree) -> Iterator[tuple[str, Any]]:
    return ((keystr(path, simple=True, separator="/"), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0])


def _map_paths(function: Any, tree: Tree) -> Tree:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(keystr(path, simple=True, separator="/"), leaf), tree)


def axes_in(spec: PartitionSpec) -> set[str | None]:
    """Return the mesh axes over which an array with this `PartitionSpec` is sharded, and perhaps None."""
    return {axis for axes in spec for axis in (axes if isinstance(axes, tuple) else (axes,))}


def without_devices(mesh: Mapping[str, int]) -> AbstractMesh:
    """Return an abstract JAX mesh with these axis sizes."""
    return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


def shard_bytes(leaf: Any) -> int:
    """Return the bytes of an array, or of a spec with a sharding, on each device."""
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
