"""The equations of a model as a chain: the equations that depend on its inputs, in order, and what else each of them needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
import numpy as np

from jpipe.errors import InputError
from jpipe.model.jaxprs._dependence import bodies, is_literal, nbytes
from jpipe.model.jaxprs._primitives import CHEAP
from jpipe.model.jaxprs._wanted import needed
from jpipe.model.traced.flat._flatten import CUT as MARK


@dataclass(frozen=True)
class Chain:
    """A flat jaxpr; the equations that depend on the inputs of the model are separate from all others.

    Positions count equations: the position i is before equation i.
    """

    jaxpr: Any  # the flat jaxpr
    consts: Mapping[Any, Any]  # the values of its constants
    inputs: Sequence[Any]  # the variables of the model's inputs
    key: Any  # the variable of the random key
    leaves: Sequence[Any]  # the variables of parameters and layer state, in order
    num_params: int  # the number of parameters, which come first in `leaves`
    outputs: Sequence[Any]  # the results of the model, variables or literals
    new_state: Mapping[int, Any]  # the new value of each leaf of the layer state, by its number among `leaves`
    # the equations that depend on the inputs, in order. Those that only new layer state needs come as early as possible.
    equations: Sequence[Any]
    sources: Mapping[Any, Any]  # for each variable that does not depend on the inputs, the equation that computes it

    @cached_property
    def made(self) -> dict[Any, int]:
        """For each variable that depends on the inputs, the number of the equation that computes it; -1 for the inputs."""
        made = dict.fromkeys(self.inputs, -1)
        for number, equation in enumerate(self.equations):
            made.update((var, number) for var in equation.outvars if not isinstance(var, jex.DropVar))
        return made

    @cached_property
    def last(self) -> dict[Any, int]:
        """For each variable in `made` the number of the last equation that reads it; for results of the model, the number of equations."""
        last: dict[Any, int] = {}
        for number, equation in enumerate(self.equations):
            last.update((var, number) for var in _variables(equation.invars) if var in self.made)
        last.update((var, len(self.equations)) for var in _variables(self.outputs) if var in self.made)
        return last

    @cached_property
    def _needs(self) -> dict[Any, frozenset[Any]]:
        """For each variable that does not depend on the inputs: the parameters and state (by number) and the key (None) that it needs."""
        needs: dict[Any, frozenset[Any]] = {var: frozenset([number]) for number, var in enumerate(self.leaves)}
        needs[self.key] = frozenset([None])
        for equation in self.jaxpr.eqns:
            if equation.outvars and equation.outvars[0] in self.sources:
                of_inputs = [needs[var] for var in _variables(equation.invars) if needs.get(var)]
                union = frozenset().union(*of_inputs)
                needs.update(dict.fromkeys(equation.outvars, union))
        return needs

    @cached_property
    def reads(self) -> list[frozenset[Any]]:
        """The parameters, layer state (by number) and key (None) that each equation reads, directly or through `sources`."""
        return [self.needs_of(equation.invars) for equation in self.equations]

    def needs_of(self, variables: Iterable[Any]) -> frozenset[Any]:
        """Return the parameters, layer state and key that these variables need; variables that depend on the inputs are skipped."""
        return frozenset().union(*(self._needs[var] for var in _variables(variables) if var in self._needs))

    def behind(self, variables: Iterable[Any]) -> list[Any]:
        """Return, in order, the equations in `sources` that compute these variables."""
        seen: dict[int, Any] = {}
        to_do = [var for var in _variables(variables) if var in self.sources]
        while to_do:
            equation = self.sources[to_do.pop()]
            if id(equation) not in seen:
                seen[id(equation)] = equation
                to_do += [var for var in _variables(equation.invars) if var in self.sources]
        return sorted(seen.values(), key=lambda equation: self._order[id(equation)])

    @cached_property
    def _order(self) -> dict[int, int]:
        """The position of each equation of the jaxpr, by `id`, because equations cannot be compared."""
        return {id(equation): position for position, equation in enumerate(self.jaxpr.eqns)}

    @cached_property
    def marks(self) -> dict[int, str]:
        """The names of marked cuts, by the position after the mark."""
        names = ((number, equation.params.get("name")) for number, equation in enumerate(self.equations))
        return {number + 1: name[len(MARK) : -1] for number, name in names if isinstance(name, str) and name.startswith(MARK)}

    @cached_property
    def work(self) -> np.ndarray:
        """An estimate of the operations before each position."""
        return np.concatenate([[0], np.cumsum([operations(equation) for equation in self.equations])])

    @cached_property
    def widths(self) -> np.ndarray:
        """The bytes that pass each position. Large values that are cheap to compute from the inputs, such as masks, are computed again."""
        last = dict(self.last)
        roots: dict[Any, frozenset[Any]] = {var: frozenset([var]) for var in self.inputs}
        for equation in self.equations:
            variables = list(_variables(equation.invars))
            if not is_cheap(equation) or self.needs_of(variables) or not all(var in roots for var in variables if var in self.made):
                continue
            union = frozenset().union(*(roots[var] for var in variables if var in roots))
            for var in equation.outvars:
                if var in last:
                    roots[var] = union
                    if nbytes(var) > sum(map(nbytes, union)):
                        for root in union:
                            last[root] = max(last[root], last[var])
                        del last[var]
        change = np.zeros(len(self.equations) + 2, np.int64)
        for var, number in last.items():
            change[self.made[var] + 1] += nbytes(var)
            change[number + 1] -= nbytes(var)
        return np.cumsum(change)[:-1]


def chain_of(closed: Any, num_params: int, num_leaves: int, written: Sequence[int], num_outputs: int) -> Chain:
    """Return the chain of a flat jaxpr from (parameters, layer state, key, inputs) to (outputs, new layer state).

    `num_leaves` counts parameters and layer state; `written` has for each result after the outputs the leaf of state that it updates, by
    number among these. Raise InputError if the model has ordered side effects.
    """
    jaxpr = closed.jaxpr
    leaves, key, inputs = jaxpr.invars[:num_leaves], jaxpr.invars[num_leaves], jaxpr.invars[num_leaves + 1 :]
    outputs = jaxpr.outvars[:num_outputs]
    new_state = dict(zip(written, jaxpr.outvars[num_outputs:], strict=True))
    of_inputs, chain, sources = set(inputs), [], dict[Any, Any]()
    for equation in _needed(jaxpr):
        if any(var in of_inputs for var in _variables(equation.invars)) or not equation.outvars or equation.effects:
            chain.append(equation)
            of_inputs.update(equation.outvars)
        else:
            sources.update(dict.fromkeys(equation.outvars, equation))
    ordered = _early(chain, {var for var in _variables(outputs) if var in of_inputs}, set(inputs))
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    return Chain(jaxpr, consts, inputs, key, leaves, num_params, outputs, new_state, ordered, sources)


def _needed(jaxpr: Any) -> list[Any]:
    """Return the equations with results that are needed, or with side effects. Raise InputError if an equation has ordered side effects."""
    equations = [jaxpr.eqns[number] for number in needed(jaxpr, jaxpr.outvars, doubtful=())[1]]
    for equation in equations:
        if any("ordered" in type(effect).__name__.lower() for effect in equation.effects):
            raise InputError(
                where="from_model",
                expected="no ordered side effects",
                found=f"'{equation.primitive.name}' with ordered=True",
                change="stages run at the same time, so there is no order between them: leave it out, or use ordered=False",
            )
    return equations


def _early(equations: Sequence[Any], outputs: set[Any], inputs: set[Any]) -> list[Any]:
    """Move equations that no output needs directly after their operands, so that new layer state is computed in the operands' layer."""
    wanted, for_outputs = set(outputs), set()
    for equation in reversed(equations):
        if any(var in wanted for var in equation.outvars):
            for_outputs.add(id(equation))
            wanted.update(_variables(equation.invars))
    place: dict[Any, int] = dict.fromkeys(inputs, -1)
    keyed = []
    for number, equation in enumerate(equations):
        is_side = id(equation) not in for_outputs and bool(equation.outvars)
        position = max((place.get(var, -1) for var in _variables(equation.invars)), default=-1) if is_side else number
        place.update(dict.fromkeys(equation.outvars, position))
        keyed.append(((position, is_side, number), equation))
    return [equation for _, equation in sorted(keyed, key=lambda pair: pair[0])]


def _variables(variables: Iterable[Any]) -> Iterable[Any]:
    return (var for var in variables if not is_literal(var))


# What equations cost ---------------------------------------------------------------------------------------------------


def is_cheap(equation: Any) -> bool:
    """Return whether a later layer may compute the equation again."""
    return equation.primitive.name in CHEAP


def operations(equation: Any) -> int:
    """Return an estimate of the operations of an equation."""
    name, params = equation.primitive.name, equation.params
    read = () if name in ("gather", "dynamic_slice") else _variables(equation.invars)
    size = max((_size(var) for var in (*equation.outvars, *read)), default=0)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * _size(equation.outvars[0]) * int(np.prod([equation.invars[0].aval.shape[dim] for dim in contracted], dtype=np.int64))
    if name == "conv_general_dilated":
        kernel, spec = equation.invars[1].aval, params["dimension_numbers"].rhs_spec
        return 2 * _size(equation.outvars[0]) * int(np.prod(kernel.shape, dtype=np.int64)) // kernel.shape[spec[0]]
    if name == "ragged_dot_general" or name == "ragged_dot":
        return 2 * _size(equation.outvars[0]) * equation.invars[0].aval.shape[-1]
    inner = sum(operations(each) for body, _ in bodies(equation) for each in body.eqns)
    return max(inner * int(params.get("length", 1) or 1), size)


def is_contraction(equation: Any) -> bool:
    """Return whether an equation is, or has in its bodies, a product of matrices, a convolution, or a look-up in a table."""
    names = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "gather", "dynamic_slice")
    return equation.primitive.name in names or any(is_contraction(each) for body, _ in bodies(equation) for each in body.eqns)


def _size(var: Any) -> int:
    return int(np.prod(getattr(getattr(var, "aval", None), "shape", ()), dtype=np.int64))


# The mark of a cut ----------------------------------------------------------------------------------------------------

T = TypeVar("T")


def cut(x: T, name: str) -> T:
    """Mark a place in a model where `LayerStack.from_model` cuts it; return `x`.

    A model with marks is cut only at the marks. Outside of `from_model`, a mark does nothing.

    Args:
        x: the arrays that the model uses next, any pytree. Other values may pass the cut, too.
        name: the id of the layer that ends here. Each mark needs its own name.

    Raises:
        InputError: the name is not a string, or is empty.

    Example:
        >>> import jax.numpy as jnp
        >>> float(cut(jnp.sin(0.0), "encoder"))
        0.0
    """
    if not isinstance(name, str) or not name:
        raise InputError(where="cut", expected="the id of a layer, a non-empty string", found=repr(name))

    def identity(x: Any) -> Any:
        return x

    identity.__name__ = f"{MARK}{name}]"
    return jax.jit(identity)(x)  # in a trace this is an equation with a name
