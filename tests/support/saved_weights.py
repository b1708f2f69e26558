"""Where the newest whole weights of a run are."""

from pathlib import Path

from thinwire.launch.run.weights import newest, weight_file


def weights_of(run: Path, stage: int) -> Path:
    """The file of one stage."""
    saved = newest(run)
    assert saved is not None, f"no whole set of weights in {run}"
    return weight_file(run, saved, stage)
