"""The cheapest set of nodes that separates the sources of an acyclic graph from its sinks."""

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import TypeVar

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

Node = TypeVar("Node", bound=Hashable)

_MOST = 2**28  # the largest sum of all costs in the flow; SciPy's flows are integers of 32 bits
_ENDLESS = 2**30


def cheapest_cut(wanted: Iterable[Node], cost: Callable[[Node], int], inputs_of: Callable[[Node], Collection[Node] | None]) -> list[Node]:
    """Return the nodes with the least total cost from which all wanted nodes can be computed; these may be chosen themselves.

    Among sets of the same cost, sets with few nodes are preferred. `inputs_of` returns the nodes from which a node can be computed at no
    cost, or None if a needed node must be chosen itself.
    """
    wanted = set(to_do := list(wanted))
    costs, inputs = dict[Node, int](), dict[Node, set[Node]]()
    while to_do:
        node = to_do.pop()
        if node not in costs:
            costs[node] = cost(node)
            if (sources := inputs_of(node)) is not None:
                to_do += sources
                inputs[node] = set(sources)
    if not inputs:
        return list(costs)
    nodes = list(costs)
    number = {node: i for i, node in enumerate(nodes)}
    unit = max(sum(costs.values()) // _MOST, 1)
    source, sink = 2 * len(nodes), 2 * len(nodes) + 1
    # Each node is an edge from 2 i to 2 i + 1 that carries its cost.
    edges = [(2 * i, 2 * i + 1, costs[node] // unit + 1) for node, i in number.items()]
    edges += [(source, 2 * i, _ENDLESS) for node, i in number.items() if node not in inputs]
    edges += [(2 * number[before] + 1, 2 * number[node], _ENDLESS) for node, sources in inputs.items() for before in sources]
    edges += [(2 * number[node] + 1, sink, _ENDLESS) for node in wanted]
    rows, columns, capacities = (np.array(column, np.int32) for column in zip(*edges, strict=True))
    graph = coo_matrix((capacities, (rows, columns)), shape=(sink + 1, sink + 1)).tocsr()
    residual = graph - maximum_flow(graph, source, sink).flow
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
    return [node for node, i in number.items() if 2 * i in reached and 2 * i + 1 not in reached]
