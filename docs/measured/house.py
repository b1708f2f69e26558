"""How large the code is and how its rooms depend on each other: python docs/measured/house.py [FOLDER].

A room is a file or a folder that lies directly in a package; an arrow goes from a room to one that it imports. Floors
count the longest chain of arrows, rooms that import each other in a circle being on one floor. Nothing is imported: the
code is read as text.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGES = ("errors", "compress", "models", "pipeline", "launch")

Graph = Mapping[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Each module's name without `thinwire.`, and its file."""
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports(path: Path) -> Iterator[str]:
    """The names that a file imports from Thinwire, wherever in it, without `thinwire.`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith("thinwire."):
            yield from (f"{node.module}.{alias.name}".removeprefix("thinwire.") for alias in node.names)


def graph_of(found: Mapping[str, Path]) -> dict[str, set[str]]:
    """Module -> the modules that it imports."""
    graph: dict[str, set[str]] = {name: set() for name in found}
    for name, path in found.items():
        for imported in imports(path):
            target = imported if imported in found else imported.rpartition(".")[0]
            if target in found and target != name:
                graph[name].add(target)
    return graph


def rooms_of(graph: Graph, found: Mapping[str, Path]) -> dict[str, set[str]]:
    """Room -> the rooms that it imports."""
    room = {name: ".".join(name.split(".")[:2]) for name in found}
    rooms: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        rooms[room[name]] |= {room[target] for target in targets} - {room[name]}
    return rooms


def floors(rooms: Graph) -> int:
    """The longest chain of arrows between rooms that do not import each other, directly or through others."""

    @cache
    def below(room: str) -> frozenset[str]:
        reached, new = set[str](), {room}
        while new:
            reached |= new
            new = {target for each in new for target in rooms.get(each, ())} - reached
        return frozenset(reached)

    @cache
    def height(room: str) -> int:
        under = [target for target in below(room) if room not in below(target)]
        return 1 + max(map(height, under), default=0)

    return max(map(height, rooms), default=0)


def main(root: Path) -> None:
    """Print a line for each package, and one for the files that a single other file imports."""
    found = modules(root)
    graph = graph_of(found)
    rooms = rooms_of(graph, found)
    print(f"{'':10}{'lines':>8}{'files':>7}{'rooms':>7}{'floors':>8}{'arrows':>8}")
    for package in PACKAGES:
        own = {name: path for name, path in found.items() if name.split(".")[0] == package}
        lines = sum(len(path.read_text().splitlines()) for path in own.values())
        inner = {
            room: {target for target in targets if target.split(".")[0] == package}
            for room, targets in rooms.items()
            if room.split(".")[0] == package
        }
        arrows = sum(map(len, inner.values()))
        print(f"{package:10}{lines:8,}{len(own):7}{len(inner):7}{floors(inner):8}{arrows:8}")
    importers = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            importers[target].add(name)
    once = sum(len(each) == 1 for each in importers.values())
    total = sum(len(path.read_text().splitlines()) for path in found.values())
    print(f"all: {total:,} lines in {len(found)} files, {once} of which one other file imports")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
