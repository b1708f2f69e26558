import pytest

from thinwire.pipeline.saving import checkpoint_folder


@pytest.fixture(autouse=True)
def retired_parts(request, monkeypatch):
    """Rows of retired checkpoints are folded at once, late or never, by the seed of a test; without one at once."""
    case = getattr(request.node, "callspec", None)
    seed = case.params.get("seed", 0) if case else 0
    monkeypatch.setattr(checkpoint_folder, "MOST_RETIRED", (0, 2, 64)[seed % 3])
