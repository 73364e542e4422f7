"""Draw the packages in jpipe, planner and train with what they import, read from the code by Grimp (`make pictures`)."""

from typing import Any

import grimp
import matplotlib.axes
from matplotlib.figure import Figure

PACKAGES = "jpipe", "jpipe_planner", "jpipe_train"


def rooms(package: str) -> tuple[dict[str, int], dict[str, set[str]]]:
    """Return the children of a package with the number of modules of each, and which others each of them imports."""
    graph = grimp.build_graph(package)
    children = sorted(graph.find_children(package))
    sizes = {child: sum(not graph.find_children(module) for module in {child, *graph.find_descendants(child)}) for child in children}
    imports = {child: {other for other in children if other != child and _imports(graph, child, other)} for child in children}
    return sizes, imports


def _imports(graph: Any, importer: str, imported: str) -> bool:
    inside = {importer, *graph.find_descendants(importer)}
    targets = {imported, *graph.find_descendants(imported)}
    return any(graph.find_modules_directly_imported_by(module) & targets for module in inside)


def heights(imports: dict[str, set[str]]) -> dict[str, int]:
    """Compute the level of each package: one more than the highest that it imports.

    Raises:
        ValueError: packages import each other in a cycle.
    """
    levels: dict[str, int] = {}
    while len(levels) < len(imports):
        ready = [name for name, imported in imports.items() if name not in levels and imported <= levels.keys()]
        if not ready:
            raise ValueError(f"import each other in a cycle: {', '.join(sorted(imports.keys() - levels.keys()))}")
        levels |= {name: 1 + max((levels[other] for other in imports[name]), default=-1) for name in ready}
    return levels


def needed(imports: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Return the arrows to draw, without those that other arrows imply."""

    def behind(name: str) -> set[str]:
        return imports[name].union(*(behind(other) for other in imports[name]))

    return {
        (name, other) for name, imported in imports.items() for other in imported if all(other not in behind(third) for third in imported)
    }


def draw(axes: matplotlib.axes.Axes, package: str) -> None:
    """Draw one package: a box for each of its packages, with importers above what they import."""
    sizes, imports = rooms(package)
    height = heights(imports)
    levels = [[name for name in sizes if height[name] == level] for level in range(max(height.values()) + 1)]
    coordinates = {name: ((n + 0.5) / len(level), y) for y, level in enumerate(levels) for n, name in enumerate(level)}
    for importer, imported in sorted(needed(imports)):
        (x, y), (below_x, below_y) = coordinates[importer], coordinates[imported]
        bend = 0.0 if y - below_y == 1 else 0.3 if below_x < x else -0.15  # around the boxes in between
        arrow = {"arrowstyle": "->", "color": "#777777", "shrinkA": 0, "shrinkB": 0, "connectionstyle": f"arc3,rad={bend}"}
        axes.annotate("", (below_x, below_y + 0.25), (x, y - 0.25), arrowprops=arrow)
    for name, (x, y) in coordinates.items():
        name_in_package = name.removeprefix(f"{package}.")
        label = name_in_package if sizes[name] == 1 else f"{name_in_package}\n{sizes[name]} modules"
        axes.text(x, y, label, ha="center", va="center", fontsize=8, bbox={"boxstyle": "round,pad=0.4", "fc": "#EAF2FA", "ec": "#0072B2"})
    axes.set(title=package, xlim=(0, 1), ylim=(-0.6, len(levels) - 0.4))
    axes.axis("off")


def picture() -> Figure:
    """Draw all packages side by side."""
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    figure.suptitle("What imports what: arrows point to what is imported; indirect imports are omitted", fontsize=10)
    for axes, package in zip(figure.subplots(1, len(PACKAGES)), PACKAGES, strict=True):
        draw(axes, package)
    return figure
