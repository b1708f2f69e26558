"""How large the code is, how its rooms depend on each other, and how far it is from the command line to the first step.

    python docs/measured/house.py [FOLDER] [--lines]

A room is a file or a folder that lies directly in a package; an arrow goes from a room to one that it imports. Floors
count the longest chain of arrows, rooms that import each other in a circle being on one floor. For these the code is
read as text. Then processes import what is in FOLDER: one trains a step of quickstart as `thinwire simulate` does, and
counts the functions of Thinwire that are called before; others measure the processor's seconds that an import takes,
which other work on the machine changes little. With --lines it only counts lines.

Of `prepare` it counts stays, files and climbs. A stay is a function that launch calls before `prepare` returns, or that
calls one of launch, once for each caller: a method and a property, too. A lambda is part of the function that it is
written in. A file is one that a stay is in. A climb is a stay in a file that imports the caller's, directly or through
others, as that of a callback does.

Another commit is measured as today's: `git worktree add ../before 6d675f28`, and FOLDER is ../before, with what
its setup.cfg asks for installed.
"""

import ast
import json
import os
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGES = ("errors", "compress", "models", "pipeline", "launch")

Graph = Mapping[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Each module's name without `thinwire.`, and its file."""
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def lines_of(root: Path) -> dict[str, int]:
    """The lines of each package."""
    return {
        package: sum(len(path.read_text().splitlines()) for path in (root / package).rglob("*.py"))
        for package in PACKAGES
    }


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


def _below(graph: Graph, begin: str) -> frozenset[str]:
    """What is reached from a room or a module by its arrows, itself included."""
    reached, new = set[str](), {begin}
    while new:
        reached |= new
        new = {target for each in new for target in graph.get(each, ())} - reached
    return frozenset(reached)


def floors(rooms: Graph) -> int:
    """The longest chain of arrows between rooms that do not import each other, directly or through others."""
    below = cache(partial(_below, rooms))

    @cache
    def height(room: str) -> int:
        under = [target for target in below(room) if room not in below(target)]
        return 1 + max(map(height, under), default=0)

    return max(map(height, rooms), default=0)


WALK = """
import json, sys
from pathlib import Path
from thinwire.launch import cli
root, called, files, calls, preparing = str(Path(sys.argv[1]).resolve()), set(), set(), [], False
def is_ours(code):
    return "/thinwire/" in code.co_filename and (code.co_name[0] != "<" or code.co_name == "<lambda>")
def place(code):
    return code.co_filename.rpartition("/thinwire/")[2], code.co_qualname.removesuffix(".<locals>.<lambda>")
def profile(frame, event, argument):
    global preparing
    code = frame.f_code
    if event not in ("call", "return") or not is_ours(code):
        return
    if code.co_name == "prepare":
        preparing = event == "call"
    if event == "return" or code.co_name == "<lambda>":
        return
    path = str(Path(code.co_filename).resolve())
    if code.co_name == "train_step":
        sys.setprofile(None)
        deep = 0
        while frame is not None:
            deep, frame = deep + ("/thinwire/" in frame.f_code.co_filename), frame.f_back
        print("functions", json.dumps([len(called), len(files), deep, calls]), file=sys.stderr)
    if preparing and code.co_flags & 1:  # the body of a class is no function
        above = frame.f_back
        while not is_ours(above.f_code):
            above = above.f_back
        calls.append((place(above.f_code), place(code)))
    called.add((path, code.co_firstlineno))
    files.add(path)
sys.setprofile(profile)
cli.main(["simulate", "quickstart", "--training.steps", "1", "--data.limit", "40000", "--output", sys.argv[2]])
"""
"""Trains a step, and prints how many functions of how many files were called before, how many are under way, and the
calls of `prepare`: caller and called, each a file and a name."""
IMPORTS = {
    "import thinwire.pipeline": "import thinwire.pipeline",
    "thinwire --help": "from thinwire.launch import cli; cli.main(['--help'])",
}


Place = tuple[str, str]
"""The file of a function, from the folder of the packages on, and its name in it."""


def to_the_first_step(layout: Path, root: Path) -> tuple[int, int, int, set[tuple[Place, Place]]]:
    """Functions called before the first step, their files, those that call each other to begin it; the stays."""
    done = _python(layout, "-c", WALK, str(root), str(layout / "run"))
    said = next(line for line in done.stderr.splitlines() if line.startswith("functions "))
    called, files, deep, calls = json.loads(said.partition(" ")[2])
    pairs = {((*caller,), (*function,)) for caller, function in calls}
    return called, files, deep, {pair for pair in pairs if any(file.startswith("launch/") for file, _ in pair)}


def climbs(stays: set[tuple[Place, Place]], graph: Graph, found: Mapping[str, Path], root: Path) -> int:
    """How many stays are in a file that imports the caller's, directly or through others."""
    module = {str(path.relative_to(root)): name for name, path in found.items()}
    ways = [(module[caller], module[function]) for (caller, _), (function, _) in stays if caller != function]
    return sum(low in _below(graph, high) for low, high in ways)


def processor_seconds(layout: Path, code: str, repetitions: int = 5) -> float:
    """The least seconds of a processor that a process takes to run a line of Python."""
    taken = []
    for _ in range(repetitions):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _python(layout, "-c", code)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(taken)


def _python(layout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(layout)}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=layout, capture_output=True, text=True, check=True
    )


def lay_out(root: Path, folder: Path) -> None:
    """Put the packages of a copy of the repository where Python finds them as `thinwire`, before an installed one."""
    (folder / "thinwire").mkdir()
    (folder / "thinwire/__init__.py").touch()
    for package in PACKAGES:
        (folder / "thinwire" / package).symlink_to((root / package).resolve())


def main(words: list[str]) -> None:
    """Print a line for each package, one for the files that a single other file imports, and what running it tells."""
    root = Path(next((word for word in words if word != "--lines"), "."))
    lines = lines_of(root)
    if "--lines" in words:
        print(", ".join(f"{package} {count:,}" for package, count in lines.items()) + f"; all {sum(lines.values()):,}")
        return
    found = modules(root)
    graph = graph_of(found)
    rooms = rooms_of(graph, found)
    print(f"{'':10}{'lines':>8}{'files':>7}{'rooms':>7}{'floors':>8}{'arrows':>8}")
    for package in PACKAGES:
        own = {name: path for name, path in found.items() if name.split(".")[0] == package}
        inner = {
            room: {target for target in targets if target.split(".")[0] == package}
            for room, targets in rooms.items()
            if room.split(".")[0] == package
        }
        arrows = sum(map(len, inner.values()))
        print(f"{package:10}{lines[package]:8,}{len(own):7}{len(inner):7}{floors(inner):8}{arrows:8}")
    importers = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            importers[target].add(name)
    once = sum(len(each) == 1 for each in importers.values())
    print(f"all: {sum(lines.values()):,} lines in {len(found)} files, {once} of which one other file imports")
    with TemporaryDirectory() as folder:
        lay_out(root, Path(folder))
        called, files, deep, stays = to_the_first_step(Path(folder), root)
        print(f"to the first step: {called:,} functions of {files} files, {deep} of them under way when it begins")
        inside = len({file for _, (file, _) in stays})
        print(f"prepare: {len(stays)} stays in {inside} files, {climbs(stays, graph, found, root)} climbs")
        for name, code in IMPORTS.items():
            print(f"{name}: {processor_seconds(Path(folder), code):.2f} s of a processor")


if __name__ == "__main__":
    main(sys.argv[1:])
