"""Profiles in PipeDream's `graph.txt` format: a graph of nodes with their times and sizes, read as layers in a linear order.

    node2 -- Conv2d(3, 64) -- forward_compute_time=2.0, backward_compute_time=5.1, activation_size=1024.0, parameter_size=7168.0
    node7 -- LSTM(8, 8) -- forward_compute_time=3.1, backward_compute_time=5.3, activation_size=[64.0; 8.0], parameter_size=512.0
    <tab>node2 -- node7

Times are milliseconds per minibatch, and sizes are bytes per minibatch. If a node has several output sizes, their sum counts. An edge goes
from producer to consumer.
"""

import graphlib
import heapq
import math
import re
from dataclasses import dataclass, field

from jpipe import InputError
from jpipe.errors import nearest
from jpipe_planner.profile.profile import AtSize, LayerProfile, Profile

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_MOST = {"ms": 1e9, "bytes": 1e13}  # sums over thousands of layers stay exact
_EXAMPLE = f"'nodeN -- DESCRIPTION -- {', '.join(f'{name}=NUMBER' for name in _FIELDS)}'"

_LONGEST = 10_000  # characters of a line; published profiles have a few hundred


@dataclass
class _Node:
    line: int
    number: int
    is_input: bool
    forward: float
    backward: float
    outputs: int
    weights: int
    before: set[str] = field(default_factory=set)
    behind: set[str] = field(default_factory=set)


def read_graph_txt(text: str, rows: int, *, where: str = "graph.txt") -> Profile:
    """Read a profile from PipeDream's profiler.

    The nodes become layers in topological order; if several nodes could come next, the node with the smallest number does. Every tensor
    that is computed before a cut and used after it crosses the cut once. An `Input` node is not a layer, because its time is spent by the
    data loader; its tensors are the inputs of the model. A forward keeps its own output for its backward. The optimizer state has as many
    bytes as the parameters, as with momentum. Temporaries are unknown.

    Example:
        ```python
        profile = read_graph_txt(Path("vgg16/graph.txt").read_text(), rows=128)
        ```

    Args:
        text: the text of the file.
        rows: the number of rows in the profiled minibatch (in the published files 128 images for VGG-16 and ResNet-50, and 32 sentences for
            GNMT).
        where: the source, such as a file name, for error messages.

    Raises:
        InputError: a line is neither a node nor an edge, a node is duplicate or missing, a number is invalid or negative, there is a
            cycle, or there are no layers; the message names the line.
    """
    nodes = _read(text, where)
    order = _in_a_line(nodes, where)
    waits_for = {name: len(node.behind) for name, node in nodes.items()}
    crossing = 0  # bytes of the tensors that are computed before a cut and used after it
    layers = []
    for name in order:
        node = nodes[name]
        crossing += node.outputs if node.behind else 0
        for other in node.before:
            waits_for[other] -= 1
            crossing -= nodes[other].outputs if not waits_for[other] else 0
        if node.is_input:
            continue
        at = AtSize(forward=node.forward, backward=node.backward, outputs=crossing, residuals={"none": node.outputs})
        layers.append(LayerProfile(id=name, weights=node.weights, optimizer=node.weights, at=(at,)))
    if not layers:
        raise InputError(where=where, expected="at least one node that is no input", found="none", change="is this a profile of PipeDream?")
    inputs = sum(node.outputs for node in nodes.values() if node.is_input)
    try:
        return Profile(source="imported", sizes=(rows,), inputs=(inputs,), labels=(0,), layers=tuple(layers))
    except InputError as error:
        raise error.at(where) from None


def _read(text: str, where: str) -> dict[str, _Node]:
    """Read the nodes by name, in the order of their numbers, with their edges."""
    nodes: dict[str, _Node] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        location = f"{where}, line {number}"
        if not line.strip():
            continue
        if len(line) > _LONGEST:
            raise InputError(f"{location}: expected at most {_LONGEST:,} characters, found {len(line):,}; is this a profile of PipeDream?")
        if line.startswith("\t"):
            if (edge := re.fullmatch(r"\t(\w+) -- (\w+)\s*", line)) is None:
                raise InputError(where=location, expected="an edge, '<tab>nodeA -- nodeB'", found=repr(line))
            edges.append((number, edge[1], edge[2]))
        else:
            name, node = _node(line, number, location)
            if name in nodes:
                raise InputError(f"{location}: node '{name}' is already defined in line {nodes[name].line}; give each node its own name")
            nodes[name] = node
    for number, source, target in edges:
        for name in (source, target):
            if name not in nodes:
                raise InputError(f"{where}, line {number}: the edge names '{name}', which is no node; {nearest(name, nodes)}")
        nodes[source].behind.add(target)
        nodes[target].before.add(source)
    return dict(sorted(nodes.items(), key=lambda item: (item[1].number, item[0])))


def _node(line: str, number: int, location: str) -> tuple[str, _Node]:
    parts = line.strip().split(" -- ")
    name, values = parts[0], dict(re.findall(r"(?<!\w)(\w+)=(\[[^],]*\]|[^,]*)", parts[-1]))
    match = re.fullmatch(r"[A-Za-z_]*(\d{1,18})", name)
    if len(parts) < 3 or match is None or tuple(values) != _FIELDS:
        raise InputError(where=location, expected=f"{_EXAMPLE}, or an edge that begins with a tab", found=repr(line))
    forward, backward, outputs, weights = (_number(values[key], key, location) for key in _FIELDS)
    is_input = " -- ".join(parts[1:-1]).startswith("Input")
    return name, _Node(number, int(match[1]), is_input, forward / 1e3, backward / 1e3, round(outputs), round(weights))


def _number(text: str, key: str, location: str) -> float:
    """Read a number, or the sum of several in brackets."""
    several = key == "activation_size" and text.startswith("[") and text.endswith("]")
    try:
        values = [float(part) for part in text[1:-1].split(";")] if several else [float(text)]
    except ValueError:
        values = [math.nan]
    if not (all(value >= 0 for value in values) and sum(values) < math.inf):
        raise InputError(where=location, key=key, expected="a number, 0 or above", found=repr(text))
    unit = "ms" if key.endswith("_time") else "bytes"
    if sum(values) > _MOST[unit]:
        raise InputError(f"{location}: {key}: expected at most {_MOST[unit]:.0e} {unit}, found {text!r}; is the unit another one?")
    return sum(values)


def _in_a_line(nodes: dict[str, _Node], where: str) -> list[str]:
    """Return a topological order: the inputs, and then always the smallest number among the nodes that could come next."""
    sorter = graphlib.TopologicalSorter({name: node.before for name, node in nodes.items()})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        *cycle, _ = error.args[1]
        first = cycle.index(min(cycle))
        around = " -- ".join((*cycle[first:], *cycle[: first + 1]))
        raise InputError(
            f"{where}, line {nodes[min(cycle)].line}: the edges go around: {around}; expected a graph without cycles"
        ) from None
    ready, order = list[tuple[bool, int, str]](), list[str]()
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, (not nodes[name].is_input, nodes[name].number, name))
        *_, name = heapq.heappop(ready)
        order.append(name)
        sorter.done(name)
    return order
