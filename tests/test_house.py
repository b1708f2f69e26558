"""What docs/measured/house.py says of the way to the first step, on a house of three files."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSE = runpy.run_path(str(ROOT / "docs/measured/house.py"))
FILES = {"launch.plan": "launch/plan.py", "models.cut": "models/cut.py", "errors": "errors/__init__.py"}
GRAPH = {"launch.plan": {"models.cut"}, "models.cut": {"errors"}, "errors": set()}


def test_a_climb_is_a_call_into_a_file_that_imports_the_callers():
    found = {name: ROOT / file for name, file in FILES.items()}
    plan, other, cut, errors = ("launch/plan.py", 1), ("launch/plan.py", 9), ("models/cut.py", 1), (FILES["errors"], 1)
    down = {(plan, cut), (plan, other), (plan, errors), (cut, errors)}
    assert HOUSE["climbs"](down, GRAPH, found, ROOT) == 0
    assert HOUSE["climbs"](down | {(errors, other), (cut, plan)}, GRAPH, found, ROOT) == 2
