"""Table 1 of PipeDream's preprint (arXiv 1806.03377): its plans, beside those for the same models and clusters."""

from benchmarks.papers import stages
from benchmarks.papers.document import Table
from benchmarks.papers.partition import search_pipedream
from benchmarks.papers.pipedream import cell, machine, problem_on, replicas_of

TABLE_1: tuple[tuple[str, str, str, float, int], ...] = (
    ("VGG-16", "4 × 1 Titan X", "", 3.14 / 1.47, 32),
    ("VGG-16", "8 × 1 Titan X", "7-1", 2.99, 32),
    ("VGG-16", "16 × 1 Titan X", "", 9.86 / 3.28, 32),
    ("VGG-16", "8 × 1 V100", "7-1", 5.12, 32),
    ("Inception-v3", "8 × 1 Titan X", "8", 1.0, 32),
    ("Inception-v3", "8 × 1 V100", "7-1", 1.45, 32),
    ("S2VT", "4 × 1 Titan X", "2-1-1", 3.01, 80),
)
"""Model, cluster, the paper's configuration where it is known, its speed-up over data parallelism, and the rows of a microbatch."""


def table_1() -> list[Table]:
    """Plan the preprint's models, and find the rate of sums that gives its speed-ups."""
    head = ("model", "cluster", "preprint", "planned", "its stages", "DP: sum ÷ compute", "its stages, sums wait")
    rows = [_row(*case) for case in TABLE_1]
    return [Table("preprint, table 1", (*head, "rate for its speed-up", "share of the link"), rows)]


def _row(model: str, cluster: str, paper: str, speed_up: float, rows: int) -> tuple[str, ...]:
    problem = problem_on(model, machine(cluster), rows)
    cells = [f"{paper or '?'} ({speed_up:.2f})", cell(problem, search_pipedream(problem)), "", f"{stages.sum_share(problem):.2f}"]
    if not paper:
        return (model, cluster, *cells, "", "", "")
    replicas, link = replicas_of(model, cluster, paper), problem.topology.levels[0].bandwidth
    cells[2] = cell(problem, stages.best_cuts(problem, replicas))
    if len(replicas) == 1:  # data parallelism
        return (model, cluster, *cells, "1.00", "", "")
    slower = stages.slowness(problem, replicas, speed_up)
    rates = (f"{link / slower / 1e9:.2f} GB/s", f"{1 / slower:.0%}") if slower else ("none", "")
    return (model, cluster, *cells, f"{stages.waiting_speed_up(problem, replicas):.2f}", *rates)
