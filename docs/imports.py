"""Draw the packages in jpipe, planner and train with what they import, read from the code by Grimp (`make pictures`)."""

from typing import Any

import grimp
import matplotlib.axes
from matplotlib.figure import Figure

from docs import style

PACKAGES = "jpipe", "jpipe_planner", "jpipe_train", "jpipe_lm"


def rooms(package: str) -> tuple[dict[str, int], dict[str, set[str]]]:
    """Return the children of a package with the number of modules of each, and which others each of them imports."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True)
    children = sorted(graph.find_children(package))
    sizes = {child: sum(not graph.find_children(module) for module in {child, *graph.find_descendants(child)}) for child in children}
    imports = {child: {other for other in children if other != child and _imports(graph, child, other)} for child in children}
    return sizes, imports


CALLED_BY_THE_CORE = {"jpipe.capabilities.protocol", "jpipe.capabilities.registry"}
"""Modules that list what the core calls, in the other direction than all other imports."""


def _imports(graph: Any, importer: str, imported: str) -> bool:
    inside = {importer, *graph.find_descendants(importer)}
    targets = {imported, *graph.find_descendants(imported)} - CALLED_BY_THE_CORE
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


WIDEST = 3  # boxes that stand side by side; more are set in two rows


def coordinates(sizes: dict[str, int], imports: dict[str, set[str]]) -> dict[str, tuple[float, float]]:
    """Return the middle of each box: importers above what they import; of a wide level every second box stands half a step higher.

    Args:
        sizes: of the packages.
        imports: of each package.
    """
    height = heights(imports)
    places: dict[str, tuple[float, float]] = {}
    y = 0.0
    for level in range(max(height.values()) + 1):
        names = [name for name in sizes if height[name] == level]
        wide = len(names) > WIDEST
        places |= {name: ((n + 0.5) / len(names), y + 0.7 * (wide and n % 2)) for n, name in enumerate(names)}
        y += 1.7 if wide else 1.0
    return places


def draw(axes: matplotlib.axes.Axes, package: str) -> None:
    """Draw one package: a box for each of its packages, with importers above what they import."""
    sizes, imports = rooms(package)
    places = coordinates(sizes, imports)
    for importer, imported in sorted(needed(imports)):
        (x, y), (below_x, below_y) = places[importer], places[imported]
        bend = 0.0 if y - below_y <= 1.7 else 0.3 if below_x < x else -0.15  # around the boxes in between
        arrow = {"arrowstyle": "->", "color": style.GREY, "shrinkA": 0, "shrinkB": 0, "connectionstyle": f"arc3,rad={bend}"}
        axes.annotate("", (below_x, below_y + 0.28), (x, y - 0.28), arrowprops=arrow)
    box = {"boxstyle": "round,pad=0.3", "fc": "#EAF2FA", "ec": style.BLUE}
    for name, (x, y) in places.items():
        label = name.removeprefix(f"{package}.") + (f" ({sizes[name]})" if sizes[name] > 1 else "")
        axes.text(x, y, label, ha="center", va="center", bbox=box)
    style.title(axes, package)
    axes.set(xlim=(0, 1), ylim=(-0.5, max(y for _, y in places.values()) + 0.5))
    axes.axis("off")


@style.styled()
def picture() -> Figure:
    """Draw all packages below each other; arrows point to what is imported, and numbers count modules."""
    levels = [max(y for _, y in coordinates(*rooms(package)).values()) + 1 for package in PACKAGES]
    figure = style.figure(0.48 * sum(levels) + 0.35 * len(PACKAGES))
    for axes, package in zip(figure.subplots(len(PACKAGES), 1, height_ratios=levels), PACKAGES, strict=True):
        draw(axes, package)
    return figure
