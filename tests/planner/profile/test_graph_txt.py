"""PipeDream's graph.txt: nodes in a line, the tensors that cross a cut, and every invalid line."""

import random

import pytest

from jpipe import InputError
from jpipe_planner.profile.graph_txt import read_graph_txt


def node(name, forward=1.0, backward=2.0, size="8.0", weights=0.0, what="Conv2d(3, 64, kernel_size=(3, 3))"):
    times = f"forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}"
    return f"{name} -- {what} -- {times}, activation_size={size}, parameter_size={weights:.3f}"


# An input, a branch (node2 is used by node3 and, over its head, by node4), an LSTM with three outputs, a second input used late.
LINES = [
    node("node10", size="1.0", weights=40.0),
    node("node1", 17.9, 0.0, "1000.0", what="Input0"),
    node("node3", 3.0, 4.0, "32.0"),
    node("node4", size="[64.0; 4.0; 2.0]", what="LSTM(8, 8)"),
    node("node2", 1.5, 2.5, "16.0", 24.0),
    node("node9", 5.0, 0.0, "500.0", what="Input1"),
    "\tnode1 -- node2",
    "\tnode3 -- node4",
    "\tnode2 -- node3",
    "\tnode2 -- node4",
    "\tnode4 -- node10",
    "\tnode9 -- node10",
]


def read(lines):
    return read_graph_txt("\n".join(lines) + "\n", rows=4, where="some.txt")


def test_nodes_become_layers_and_a_cut_carries_each_crossing_tensor_once():
    profile = read(LINES)
    assert profile.ids == ("node2", "node3", "node4", "node10")
    assert (profile.source, profile.sizes, profile.inputs) == ("imported", (4,), (1500,))
    # Behind node2: its output, for two users; behind node3 both; then only the LSTM's; the late input (500) crosses all of them.
    assert [layer.at[0].outputs for layer in profile.layers] == [16 + 500, 16 + 32 + 500, 70 + 500, 0]
    assert [layer.at[0].residuals for layer in profile.layers] == [{"none": size} for size in (16, 32, 70, 1)]
    assert [(layer.at[0].forward, layer.at[0].backward) for layer in profile.layers[:2]] == [(0.0015, 0.0025), (0.003, 0.004)]
    assert [(layer.weights, layer.optimizer) for layer in profile.layers] == [(24, 24), (0, 0), (0, 0), (40, 40)]


def test_the_order_of_the_lines_does_not_matter():
    expected = read(LINES)
    for seed in range(20):
        assert read(random.Random(seed).sample(LINES, len(LINES))) == expected


def test_ties_go_to_the_smaller_number_and_not_to_the_smaller_text():
    lines = [node(f"node{n}") for n in (10, 9, 2, 1)] + [f"\tnode1 -- node{n}" for n in (10, 9, 2)]
    assert read(lines).ids == ("node1", "node2", "node9", "node10")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([node("node1"), "node1 -- node2"], "some.txt, line 2: expected 'nodeN -- DESCRIPTION -- forward_compute_time=NUMBER"),
        ([node("node1"), "\tnode1 - node2"], "some.txt, line 2: expected an edge, '<tab>nodeA -- nodeB', found '\\tnode1 - node2'"),
        ([node("node1"), "", "\tnode1 -- nod1"], "some.txt, line 3: the edge names 'nod1', which is no node; did you mean 'node1'?"),
        ([node("node1"), node("node1")], "some.txt, line 2: node 'node1' is already defined in line 1"),
        ([node("node1", forward=float("nan"))], "some.txt, line 1: forward_compute_time: expected a number, 0 or above, found 'nan'"),
        ([node("node1", backward=-1)], "some.txt, line 1: backward_compute_time: expected a number, 0 or above, found '-1.000'"),
        ([node("node1", size="[1.0; x]")], "some.txt, line 1: activation_size: expected a number, 0 or above, found '[1.0; x]'"),
        ([node("node1", size="[1e308; 1e308]")], "some.txt, line 1: activation_size: expected a number"),
        ([node("node1", forward=1e308)], "some.txt, line 1: forward_compute_time: expected at most 1e+09 ms, found '1000000"),
        ([node("node1", backward=1e16)], "some.txt, line 1: backward_compute_time: expected at most 1e+09 ms, found '1000000"),
        ([node("node1", size="1e300")], "some.txt, line 1: activation_size: expected at most 1e+13 bytes, found '1e300'"),
        ([node("node1", size="[9e12; 9e12]")], "some.txt, line 1: activation_size: expected at most 1e+13 bytes, found '[9e12; 9e12]'"),
        ([node("node1", weights=1e16)], "some.txt, line 1: parameter_size: expected at most 1e+13 bytes, found '1000000"),
        ([node("node1", size="1.0")[:-30]], "some.txt, line 1: expected 'nodeN"),
        ([node("conv")], "some.txt, line 1: expected 'nodeN"),
        (
            [node("node1"), node("node2"), node("node3"), "\tnode1 -- node2", "\tnode2 -- node3", "\tnode3 -- node2"],
            "some.txt, line 2: the edges go around: node2 -- node3 -- node2; expected a graph without cycles",
        ),
        ([node("node1"), "\tnode1 -- node1"], "some.txt, line 1: the edges go around: node1 -- node1;"),
        ([node("node1", what="Input")], "some.txt: expected at least one node that is no input, found none"),
        ([node("node1", 0, 0)], "some.txt: all times at microbatches of size 4 are zero"),
        ([], "some.txt: expected at least one node"),
    ],
)
def test_mistakes_are_reported_with_their_line(lines, message):
    with pytest.raises(InputError) as caught:
        read(lines)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
