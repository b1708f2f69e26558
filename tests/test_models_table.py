"""The table of models in docs/models.md says what the tests below run with, and no more."""

from pathlib import Path

import test_checkpoint
import test_export
import test_families
import test_sequential
import test_vision
from thinwire.models.families import FAMILIES
from thinwire.models.vision import VISION

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
FACTORY = "module:factory"
EXPORTS = (
    test_checkpoint.test_a_pretrained_model_is_read_and_what_is_exported_loads_in_the_library,
    test_export.test_models_that_transformers_lacks,
)
SHOWN = {
    "split parity": (
        test_families.test_stages_equal_the_unsplit_model,
        test_vision.test_pipelined_stages_equal_the_unsplit_model,
        test_sequential.test_pipelined_stages_equal_the_unsplit_model,
    ),
    "pretrained load": EXPORTS,
    "export round trip": EXPORTS,
}
"""What a column says of a model -> the tests that show it."""


def models_of(test):
    """The models that a test is run with."""
    for mark in test.pytestmark:
        if mark.args[0] == "name":
            return {FACTORY if ":" in name else name for name in mark.args[1]}
    return {FACTORY}


def row(title, kind, members):
    """A line of the table: "yes" of a single model, of many the names of those that were tried."""
    cells = []
    for tests in SHOWN.values():
        tried = sorted(members & set().union(*map(models_of, tests)))
        cells.append(", ".join(f"`{name}`" for name in tried) if len(members) > 1 else "yes" if tried else "-")
    return f"| {title} | {kind} | {' | '.join(cells)} |"


def table():
    kinds = {"causal-lm": "language model", "classification": "classifier of text"}
    vits = {name for name in VISION if name.startswith("vit")}
    return [
        f"| model | kind | {' | '.join(SHOWN)} |",
        "|---" * (2 + len(SHOWN)) + "|",
        *(
            row(f"`{family.name}`, {family.architecture}", kinds[family.task], {family.name})
            for family in FAMILIES.values()
        ),
        row("ResNet, ResNeXt, wide ResNet of torchvision", "classifier of images", set(VISION) - vits),
        row("ViT of torchvision", "classifier of images", vits),
        row(f"`{FACTORY}`, layers of one's own", "any", {FACTORY}),
    ]


def test_the_table_of_models_is_what_the_tests_show():
    lines = DOCUMENT.read_text().splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith("| model | kind |")), len(lines))
    end = next((at for at, line in enumerate(lines) if at > start and not line.startswith("|")), len(lines))
    wanted = "\n".join(table())
    assert "\n".join(lines[start:end]) == wanted, f"docs/models.md must have this table:\n{wanted}"
