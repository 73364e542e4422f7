"""The model as an ordered mapping of layers."""

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, get_args

import flax
import jax
import jax.numpy as jnp
from flax import linen, nnx

from jpipe.context import without_mesh
from jpipe.errors import InputError, callers_code, cause, short, shortened
from jpipe.model._adapters import adapt, initial_arrays, layers_by_id, reject_shared_modules, reject_shared_owners
from jpipe.model._layer import Layer, LayerSpec, describe, key_spec, reject_python_values, spec_of, untrainable, with_arrays
from jpipe.model._ties import ModelTree, Tie, Ties
from jpipe.model.jaxprs._constants import built_module, reject_constants
from jpipe.model.traced._cuts import Granularity
from jpipe.model.traced._model import TracedModel, cut_model
from jpipe.model.traced._trace_model import context
from jpipe.model.traced.frontends._frontends import open_function, open_model
from jpipe.model.traced.frontends._whole import Whole

Tree = Any  # a pytree of arrays


class Probed(NamedTuple):
    """An optimizer that was probed for a model."""

    optimizer: Any  # the optimizer, which is kept alive so that its `id` is not used twice
    params: Tree  # the shapes of the parameters by layer id
    layerwise: Any  # the result, a `LayerwiseOptimizer`


class LayerStack:
    """The model: layers by id, in order. Any pytree may flow from one layer to the next.

    A layer is one of

    - a callable with a parameter named `rngs`: the constructor of a Flax NNX module, `lambda rngs: nnx.Linear(4, 8, rngs=rngs)`;
    - a built NNX module: a run begins with its arrays, which are not copied here; the module is not changed;
    - a Flax Linen module;
    - any other callable: a function of the layer's input, without parameters;
    - a `Layer`, for everything else.

    In training, a parameter `train`, `training` or `is_training` of a layer's call gets True, and a parameter `deterministic` or
    `use_running_average` gets False. docs/how-to/layers.md describes layers in detail.

    Random numbers, in initialization, training and evaluation, depend only on the key, the layer id and the microbatch, never on the cut.

    Args:
        layers: the layers by id. An id is a non-empty string; parameters, checkpoints and error messages use it. The ids of a list, a
            tuple, an `nnx.List`, an `nnx.Sequential` or a Linen `Sequential` are "0", "1" and so on.
        ties: the pairs of places that share a parameter. Each stage that uses a shared parameter holds a copy; the stages sum their
            gradients.
        carries_rows: whether layers keep a state of each row from batch to batch. Then no stage can have replicas, because these see
            different rows.
        mixes_rows: whether layers or the loss mix the rows of a microbatch on purpose, as routers of experts do. If False, mixed rows cause
            a warning.

    Raises:
        InputError: there is no layer, a layer is none of the above, two layers share a parameter without a tie, or the ties are wrong.

    Example:
        >>> stack = LayerStack({"in": lambda rngs: nnx.Linear(4, 8, rngs=rngs), "act": jnp.tanh})
        >>> stack.ids
        ('in', 'act')
    """

    @without_mesh()
    def __init__(
        self,
        layers: Mapping[str, Any] | Sequence[Any] | nnx.Module | linen.Module,
        ties: Iterable[Tie] = (),
        *,
        carries_rows: bool = False,
        mixes_rows: bool = False,
    ) -> None:
        layers = layers_by_id(layers)
        if not list(layers):  # `len` may be wrong
            raise InputError(where="LayerStack", expected="at least one layer", found="none")
        for layer_id in layers:
            if not isinstance(layer_id, str) or not layer_id:
                raise InputError(f"LayerStack: a layer id is a non-empty string, found {layer_id!r}")
        reject_shared_modules(layers)
        same: dict[int, Layer] = {}
        for layer_id, layer in layers.items():
            if id(layer) not in same:
                same[id(layer)] = adapt(layer_id, layer)
        self.layers: dict[str, Layer] = {layer_id: with_arrays(layer_id, same[id(layer)]) for layer_id, layer in layers.items()}
        built = {layer_id: initial_arrays(layer_id, layer) for layer_id, layer in layers.items()}
        self._built = {layer_id: arrays for layer_id, arrays in built.items() if arrays is not None}
        self._object_ids = {layer_id: id(layer) for layer_id, layer in layers.items()}
        self._alive = list(layers.values())  # so that no id() is used twice
        self._known: dict[Any, LayerSpec] = {}
        self.probed: dict[Any, Probed] = {}
        self.traced: TracedModel | None = None
        self.added: Mapping[str, Mapping[str, Layer]] = {}
        reject_shared_owners(self.layers)
        self.ties = Ties(ties, self.ids)
        self.carries_rows, self.mixes_rows = carries_rows, mixes_rows

    @classmethod
    def from_model(
        cls, model: Any, *inputs: Tree, variables: Tree | None = None, granularity: Granularity = "block", cuts: Sequence[str] = ()
    ) -> "LayerStack":
        """Cut a whole model into layers; the model is not changed.

        The model is traced with the inputs, and cut where the fewest bytes pass from one part to the next: one layer for each block. Layers
        pass on values that cross several layers, such as skip connections. Parameters that several layers read become ties. Random numbers
        are the same as in a call of the whole model with `microbatch_key`. docs/explanation/layers.md explains where a model is cut.

        Args:
            model: a built NNX module, with the initial weights; an abstract NNX module from `nnx.eval_shape`; a callable with a parameter
                `rngs` that makes an NNX module; a Linen module; or any other callable pytree of arrays, such as an Equinox module.
            inputs: example inputs of one microbatch, arrays or `jax.ShapeDtypeStruct`s. With one example, the inputs of a batch have its
                structure. With several, the inputs of a batch are a tuple, and the model is called with its items as arguments.
            variables: the variables of a Linen module in the form that its `init` returns: the initial weights and layer state. By default
                they are made from the key of the run.
            granularity: "block", or "finest" to cut at every place where no more bytes pass than before and after it.
            cuts: paths of parameters, such as "blocks.4". The model is cut before the first operation that reads each of them, and nowhere
                else. `jpipe.cut` in the model marks further places to cut.

        Raises:
            InputError: the model cannot be traced, has ordered side effects, has no place to cut it, or reads its parameters in another
                order in evaluation than in training.

        Example:
            >>> from flax import linen
            >>> model = linen.Sequential([linen.Dense(8), linen.relu, linen.Dense(8), linen.relu, linen.Dense(2)])
            >>> LayerStack.from_model(model, jnp.ones((4, 8))).ids
            ('layers_0', 'layers_2', 'layers_4')
        """
        return cls._cut(lambda specs: open_model(model, specs, variables=variables), inputs, granularity, cuts)

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        params: Tree,
        *inputs: Tree,
        state: Tree | None = None,
        granularity: Granularity = "block",
        cuts: Sequence[str] = (),
    ) -> "LayerStack":
        """Cut a model that is a pure function into layers, as `from_model` does.

        Args:
            function: `function(params, *inputs)`, or with `state` `function(params, state, *inputs) -> (outputs, new state)`. A parameter
                named `key` or `rng` gets a random key of the microbatch; parameters such as `train` get the mode, as in layers.
            params: the initial parameters, any pytree; or `jax.ShapeDtypeStruct`s if `Pipeline.init` will get arrays. Python numbers and
                arrays that are not floating point are constants.
            inputs: as in `from_model`.
            state: the initial layer state.
            granularity, cuts: as in `from_model`.

        Raises:
            InputError: an error of `from_model`.

        Example:
            >>> params = [{"w": jnp.ones((8, 8))} for _ in range(3)]
            >>> def model(params, x):
            ...     for layer in params:
            ...         x = jnp.tanh(x @ layer["w"])
            ...     return x
            >>> LayerStack.from_function(model, params, jnp.ones((4, 8))).ids
            ('0', '1', '2')
        """
        return cls._cut(lambda specs: open_function(function, params, specs, state=state), inputs, granularity, cuts)

    @classmethod
    @without_mesh()
    def _cut(
        cls, opened: Callable[[tuple[Tree, ...]], Whole], inputs: tuple[Tree, ...], granularity: Granularity, cuts: Sequence[str]
    ) -> "LayerStack":
        if not inputs:
            raise InputError(
                where="from_model",
                expected="example inputs after the model",
                found="none",
                change="give arrays of the shapes of one microbatch",
            )
        if granularity not in get_args(Granularity):
            raise InputError(where="granularity", expected="'block' or 'finest'", found=repr(granularity))
        if isinstance(cuts, str) or not all(isinstance(path, str) and path for path in cuts):
            raise InputError(where="cuts", expected="a list of paths of parameters, such as ['blocks.4']", found=short(cuts))
        try:
            specs = jax.tree.map(spec_of, inputs)
        except TypeError:
            raise InputError(where="from_model", expected="example inputs that are arrays of numbers", found=describe(inputs)) from None
        return cls._of_traced(cut_model(opened(specs), specs[0] if len(specs) == 1 else specs, granularity, cuts))

    @classmethod
    def _of_traced(cls, traced: TracedModel) -> "LayerStack":
        stack = cls(traced.layers(), traced.ties())
        stack.traced = traced
        return stack

    def recut(self, change: Callable[[Layer], Layer], prepare: Callable[[Tree], Tree]) -> "LayerStack":
        """Change the whole model of a stack that was cut from a model, and cut the result at the same places.

        Args:
            change: a function that changes the whole model, which it gets as one layer.
            prepare: a function that is applied to the parameters of each layer.
        """
        assert self.traced is not None
        return self._of_traced(self.traced.recut(change, prepare)).with_added(self.added)

    def by_layer(self, params: Tree | None) -> dict[str, tuple[Tree, Tree]]:
        """Return (parameters, state) by layer id, from the argument `params` of `Pipeline.init`; missing parts are None.

        Args:
            params: the parameters by layer id, or in the tree of the model that the layers were cut from; or None.

        Raises:
            InputError: the model is abstract, and `params` is None.
        """
        if params is None and self.traced is not None and self.traced.abstract is not None:
            raise self.traced.abstract
        if params is None:
            return {}
        if self.traced is not None:
            try:
                return self.traced.by_layer(*self.traced.whole.from_user(params))
            except InputError:
                if not isinstance(params, Mapping) or not set(params) <= set(self.ids):
                    raise
        if not isinstance(params, Mapping):
            raise InputError(where="params", expected="a dict of parameters by layer id", found=type(params).__name__)
        return {layer_id: (tree, None) for layer_id, tree in params.items()}

    @cached_property
    def initial(self) -> dict[str, tuple[Tree, Tree]]:
        """The (parameters, state) that the model has, by layer id; missing parts are None."""
        return self._built if self.traced is None else self.traced.by_layer(self.traced.whole.params, self.traced.whole.state)

    @property
    def tree(self) -> ModelTree | None:
        """The tree of parameters of the model that all layers were cut from; None for other layers."""
        return None if self.traced is None or self.added else self.traced.tree()

    def whole_params(self, params: Mapping[str, Tree]) -> Tree:
        """Convert parameters by layer id to the tree of the model that all layers were cut from; keep them by layer id without one."""
        if self.traced is None or self.added:
            return params
        return self.traced.whole.to_user(self.traced.join(params, {})[0])

    def whole_model(self, params: Mapping[str, Tree], state: Mapping[str, Tree], device: jax.Device | None = None) -> Any:
        """Return the model that the layers were cut from, with these arrays by layer id, on one device.

        Raises:
            InputError: the layers were not cut from a model, or arrays are missing.
        """
        if self.traced is None:
            raise InputError(
                "model: expected layers that were cut from a model by LayerStack.from_model, found a dict of layers; use params"
            )
        if self.added:
            raise InputError(f"model: the model has further layers, {shortened(self.ids_of_added)}, which its class lacks; use params")
        joined = self.traced.join(params, state)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(joined)):
            raise InputError(
                "model: expected a process that has all layers, found a process with some of them; save a checkpoint with "
                "jpipe.checkpoints.save, and load it in one process"
            )
        return self.traced.whole.rebuild(*jax.device_put(joined, device or jnp.zeros(()).sharding))

    @property
    def ids(self) -> tuple[str, ...]:
        """The layer ids, in order."""
        return tuple(self.layers)

    @property
    def ids_of_added(self) -> tuple[str, ...]:
        """The ids of the layers that `with_added` has added, in order."""
        return tuple(layer_id for layers in self.added.values() for layer_id in layers)

    def __repr__(self) -> str:
        return f"LayerStack({shortened(self.ids)})"

    def with_layers(self, layers: Mapping[str, Layer]) -> "LayerStack":
        """Return the model with these layers in place of its own; layers that were one object must be changed in the same way.

        Args:
            layers: the new value of the attribute `layers`.
        """
        changed = copy.copy(self)
        changed.layers, changed._known = dict(layers), {}
        return changed

    def with_added(self, added: Mapping[str, Mapping[str, Layer]]) -> "LayerStack":
        """Return the model with further layers behind some of its layers.

        Args:
            added: by the id of a layer, the layers behind it, by id.
        """
        further = {layer_id: layer for layers in added.values() for layer_id, layer in layers.items()}
        if taken := further.keys() & self.layers.keys():
            raise InputError(f"LayerStack: the model has a layer '{min(taken)}' already; rename it")
        layers = self.layers | {layer_id: with_arrays(layer_id, layer) for layer_id, layer in further.items()}
        alive = dict(zip(self.ids, self._alive, strict=True)) | further
        ids = [layer_id for before in self.ids for layer_id in (before, *added.get(before, ()))]
        changed = self.with_layers({layer_id: layers[layer_id] for layer_id in ids})
        changed.added, changed.probed = added, {}
        changed._object_ids = {layer_id: id(alive[layer_id]) for layer_id in ids}
        changed._alive = [alive[layer_id] for layer_id in ids]
        return changed

    def init_key(self, layer_id: str, key: jax.Array) -> jax.Array:
        """Return the key that initializes a layer. It depends only on the key of the run and the layer's id.

        Args:
            layer_id: the id of the layer.
            key: the random key of the run.
        """
        return key if self.layers[layer_id].of_model else _fold(jax.random.fold_in(key, 0), layer_id)

    def init_layer(self, layer_id: str, key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        """Initialize one layer and return its parameters and state.

        Args:
            layer_id: the id of the layer.
            key: the random key of the run.
            x: an input of the layer, or any arrays with its shapes and dtypes.
        """
        return self.layers[layer_id].init(self.init_key(layer_id, key), x)

    def apply(
        self,
        ids: Sequence[str],
        params: Tree,
        state: Tree,
        x: Tree,
        *,
        key: jax.Array | None,
        microbatch: Any,
        train: bool,
        carries: Mapping[str, Tree] | None = None,
    ) -> tuple[Tree, Tree]:
        """Run consecutive layers.

        Args:
            ids: the ids of the layers, in order.
            params: the parameters by layer id, including shared parameters.
            state: the layer state by layer id.
            x: the input of the first layer, for one microbatch.
            key: the random key of the run; needed if a layer draws random numbers in this mode.
            microbatch: the number of the microbatch in the run, or in evaluation in the batch; random numbers depend on it.
            train: False in evaluation: dropout is off, and batch statistics are used unchanged.
            carries: for a slice of the rows, what the layers returned for the slice before, by layer id; None for whole rows.

        Returns:
            The output of the last layer, and the new state by layer id. For a slice, the output is a pair: the output, and the carries.
        """
        new_state, left = {}, {}
        for layer_id in ids:
            layer = self.layers[layer_id]
            drawn = None
            if train and layer.stochastic:
                assert key is not None
            if key is not None and (layer.stochastic if train else layer.draws_in_evaluation):
                drawn = self.microbatch_key(key, microbatch, train) if layer.of_model else self.draw_key(key, layer_id, microbatch, train)
            arguments = params[layer_id], state[layer_id], x
            if carries is not None and layer.carried is not None:
                x, new_state[layer_id], left[layer_id] = layer.carried(*arguments, carries.get(layer_id), drawn, train)
            else:
                x, new_state[layer_id] = layer.apply(*arguments, drawn, train)
        return x if carries is None else (x, left), new_state

    def microbatch_key(self, key: jax.Array, microbatch: Any, train: bool = True) -> jax.Array:
        """Return the key with which a model that `from_model` has cut draws random numbers for one microbatch.

        A call of the whole model with this key draws the same numbers.

        Args:
            key: the random key of the run.
            microbatch: the number of the microbatch in the run, or in evaluation in the batch.
            train: False in evaluation.
        """
        return jax.random.fold_in(jax.random.fold_in(key, 4 if train else 5), microbatch)

    def draw_key(self, key: jax.Array, name: str, microbatch: Any, train: bool, *, of_metric: bool = False) -> jax.Array:
        """Return the key with which a layer, the loss or a metric draws random numbers for one microbatch.

        Args:
            key: the random key of the run.
            name: the layer's id, or the metric's name; empty for the loss.
            microbatch: as in `apply`.
            train: False in evaluation.
            of_metric: whether `name` is the name of a metric.
        """
        purpose = 3 if of_metric else 1 if train else 2  # 0 is initialization
        return jax.random.fold_in(_fold(jax.random.fold_in(key, purpose), name), microbatch)

    def is_stochastic(self, ids: Sequence[str], train: bool = True) -> bool:
        """Return whether any of the layers `ids` draws random numbers, in training or in evaluation."""
        return any(layer.stochastic if train else layer.draws_in_evaluation for layer in map(self.layers.__getitem__, ids))

    @without_mesh()
    def specs(self, inputs: Tree, ids: Sequence[str] | None = None) -> dict[str, LayerSpec]:
        """Trace the layers, and return the specs of every layer's input, parameters, state and output, by layer id.

        Args:
            inputs: one microbatch of inputs, or `jax.ShapeDtypeStruct`s like it.
            ids: consecutive layers to trace; `inputs` are the inputs of the first one. All layers by default.

        Raises:
            InputError: a layer cannot take the output of the previous layer (the message names both, with shapes); its parameters are
                complex; a forward changes the shapes of its state; or, before the last layer, its output has other shapes in evaluation
                than in training.
        """
        specs: dict[str, LayerSpec] = {}
        try:
            before, x = "the batch", jax.tree.map(spec_of, inputs)
        except TypeError:  # text, objects
            raise InputError(where="inputs", expected="arrays of numbers", found=describe(inputs)) from None
        for layer_id in self.layers if ids is None else ids:
            like = self.like(layer_id, x)
            if like not in self._known:
                self._known[like] = self._spec(layer_id, before, x)
            specs[layer_id] = self._known[like]
            before, x = layer_id, specs[layer_id].output
        if ids is None:
            self.ties.check({layer_id: spec.params for layer_id, spec in specs.items()})
        return specs

    def like(self, layer_id: str, x: Tree) -> Any:
        """Return what determines a layer's spec. Layers that are one object, such as one constructor, are traced once for each input."""
        leaves, treedef = jax.tree.flatten(x)
        if self.traced is None or layer_id in self.ids_of_added:
            same: Any = self._object_ids[layer_id]
        else:
            same = self.traced.first_equal(layer_id, x)
        return same, layer_id == self.ids[-1], treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves), context()

    def _spec(self, layer_id: str, before: str, x: Tree) -> LayerSpec:
        """Return the specs of one layer, which gets its input `x` from `before`."""
        layer, key, original = self.layers[layer_id], key_spec(), self._alive[self.ids.index(layer_id)]

        def message(error: BaseException) -> str:
            is_of_shapes = isinstance(error, (TypeError, ValueError))
            remedy = f"make the output of '{before}' fit the input of '{layer_id}', or " if is_of_shapes else ""
            remedy += f"fix '{layer_id}'"
            if isinstance(error, flax.errors.FlaxError) and (built := built_module(original)):
                remedy = f"it holds {built}, which is already built: give the constructor of this module instead"
            elif "rngs" in str(error):
                remedy = "a layer is called only with its input: pass rngs to its parts in the constructor, as nnx.Dropout(0.1, rngs=rngs)"
            return f"layer '{layer_id}' does not take its input, {describe(x)} from '{before}'; it raises {cause(error)}; {remedy}"

        def forward(params: Tree, state: Tree, x: Tree, key: jax.Array) -> tuple[Tree, Tree]:
            y, new_state = layer.apply(params, state, x, key, True)
            if layer_id != self.ids[-1]:
                reject_python_values(layer_id, y)
            return y, new_state

        with callers_code(message):
            params, state = jax.eval_shape(layer.init, key, x)
            traced, (y, new_state) = jax.make_jaxpr(forward, return_shape=True)(params, state, x, key)
            drawn = key if layer.draws_in_evaluation else None
            evaluated, _ = jax.eval_shape(lambda p, s, v, k: layer.apply(p, s, v, k, False), params, state, x, drawn)
        _reject_complex(layer_id, params)
        if not layer.of_model:  # otherwise it was checked with the whole model
            again = lambda: jax.make_jaxpr(lambda *arguments: forward(*arguments))(params, state, x, key)  # noqa: E731 - traced anew
            reject_constants(layer_id, original, traced, again)
        _require_equal(f"layer '{layer_id}': the state that a forward returns", new_state, "its input state", state)
        if layer_id != self.ids[-1]:
            _require_equal(f"layer '{layer_id}': its output in evaluation", evaluated, "its output in training", y)
        axes: Any = layer.axes
        if not isinstance(axes, Mapping):
            expected = "logical axes by path, such as {'kernel': ('embed', 'mlp')}"
            raise InputError(f"layer '{layer_id}': axes: expected {expected}, found {axes!r}")
        return LayerSpec(x, params, state, y, evaluated, dict(layer.axes))


def _fold(key: jax.Array, layer_id: str) -> jax.Array:
    digest = hashlib.blake2b(layer_id.encode(), digest_size=8).digest()  # 64 bits in two halves, because a key takes 32 bits at a time
    for half in (digest[:4], digest[4:]):
        key = jax.random.fold_in(key, int.from_bytes(half, "little"))
    return key


def _require_equal(what: str, actual: Tree, like: str, expected: Tree) -> None:
    if jax.tree.map(spec_of, actual) != jax.tree.map(spec_of, expected):
        raise InputError(f"{what} has other shapes or dtypes than {like}: expected {describe(expected)}, found {describe(actual)}")


def _reject_complex(layer_id: str, params: Tree) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise untrainable(f"{layer_id}{jax.tree_util.keystr(path)}", leaf.dtype)
