"""The tables of models in docs/reference/models.md say what the tests below run with, and no more."""

import re
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from support.family_cases import ALL
from support.models import blueprint
from thinwire.models.architectures.vision import VISION
from thinwire.models.errors import ModelError
from thinwire.models.options import ModelOptions

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "reference" / "models.md"
FACTORY = "module:factory"
EXPORTS = (
    "models/test_language_models.py::test_pretrained_weights_are_read_and_what_is_exported_loads_in_the_library",
    "models/test_checkpoint.py::test_a_pretrained_model_is_read_and_what_is_exported_loads_in_the_library",
    "launch/test_export.py::test_models_that_transformers_lacks",
)
SHOWN = {
    "split parity": (
        "models/test_families.py::test_stages_equal_the_unsplit_model",
        "models/test_language_models.py::test_three_stages_equal_the_unsplit_model",
        "models/test_vision.py::test_pipelined_stages_equal_the_unsplit_model",
        "models/test_sequential.py::test_pipelined_stages_equal_the_unsplit_model",
    ),
    "pretrained load": EXPORTS,
    "export round trip": EXPORTS,
}
"""What a column says of a model -> the tests that show it."""


REFUSED = {
    "blocks hand on more than the hidden state": "blocks of this model hand on more than the hidden state",
    "blocks run more than once": "must run each of its .* blocks once",
    "the blocks are not one list": "must have its blocks in one list",
    "weights stand outside of modules": "must hold its weights in modules",
    "the forward does not run in parts": "must run block by block, and does not",
    "no tiny copy can be made": "must be compared with a tiny copy of itself, and none can be made",
    "images or sound are read too": "must be one that reads text alone",
}
"""Why a language model is refused -> what the error says."""


class Collector:
    """A plugin that keeps what pytest collects."""

    def pytest_collection_finish(self, session):
        self.items = session.items


@pytest.fixture(scope="module")
def models_of():
    """Test -> the models that it is run with, as pytest collects it."""
    names = sorted({test for tests in SHOWN.values() for test in tests})
    collector = Collector()
    pytest.main(
        ["--collect-only", "-qq", "-p", "no:cacheprovider", *(str(TESTS / name) for name in names)], [collector]
    )
    found = {name: set() for name in names}
    for item in collector.items:
        model = item.callspec.params.get("name", FACTORY) if hasattr(item, "callspec") else FACTORY
        test = str(item.path.relative_to(TESTS)) + "::" + item.originalname
        found[test].add(FACTORY if ":" in model else model)
    assert all(found.values()), found
    return found


def cells(models_of, members):
    """What was tried: "yes" of a single model, of many the names of those that were."""
    for tests in SHOWN.values():
        tried = sorted(members & set().union(*(models_of[test] for test in tests)))
        yield ", ".join(f"`{name}`" for name in tried) if len(members) > 1 else "yes" if tried else "-"


def row(models_of, title, kind, members):
    """A line of the table."""
    return f"| {title} | {kind} | {' | '.join(cells(models_of, members))} |"


def table(models_of):
    kinds = {"causal-lm": "language models", "classification": "classifiers of text"}
    vits = {name for name in VISION if name.startswith("vit")}
    alike = {}  # kind and what was tried -> families
    for name, case in ALL.items():
        alike.setdefault((kinds[case.task], *cells(models_of, {name})), []).append(case.family)
    return [
        f"| model | kind | {' | '.join(SHOWN)} |",
        "|---" * (2 + len(SHOWN)) + "|",
        *(
            f"| {', '.join(map('`{}`'.format, sorted(names)))} | {' | '.join(shown)} |"
            for shown, names in alike.items()
        ),
        row(models_of, "ResNet, ResNeXt, wide ResNet of torchvision", "classifier of images", set(VISION) - vits),
        row(models_of, "ViT of torchvision", "classifier of images", vits),
        row(models_of, f"`{FACTORY}`, your own layers", "any", {FACTORY}),
    ]


@pytest.mark.slow
def test_the_table_of_models_is_what_the_tests_show(models_of):
    lines = DOCUMENT.read_text().splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith("| model | kind |")), len(lines))
    end = next((at for at, line in enumerate(lines) if at > start and not line.startswith("|")), len(lines))
    wanted = "\n".join(table(models_of))
    assert "\n".join(lines[start:end]) == wanted, f"docs/reference/models.md must have this table:\n{wanted}"


def refused():
    """Families that the page says are refused in their default configurations, and why."""
    found = re.findall(r"^\| ((?:`[\w-]+`,? ?)+) \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: why for names, why in found if why in REFUSED for name in re.findall("`(.+?)`", names)}


def test_every_reason_is_on_the_page():
    assert list(dict.fromkeys(refused().values())) == list(REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in refused() if name in CONFIG_MAPPING])
def test_a_family_is_refused_for_the_reason_on_the_page(name):
    with pytest.raises(ModelError, match=REFUSED[refused()[name]]):
        blueprint(ModelOptions(name=name), task="causal-lm").compare()
