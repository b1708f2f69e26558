"""The README's example is run as written, on two processes."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.processes
def test_the_python_example_runs_as_written(tmp_path):
    (example,) = blocks("python")
    script = tmp_path / "example.py"
    script.write_text(example)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launch, "--master-port", str(free_port()), str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    losses = [float(value) for value in re.findall(r"loss ([0-9.]+)", result.stdout)]
    assert len(losses) == 20, result.stdout
    assert losses[-1] < 0.5 * losses[0], losses
    sent = re.findall(r"stage (\d) sent (\d+) bytes in 80 frames instead of 163840", result.stdout)
    # q(4) and q(8) of [8, 64]: header, codes, and a bf16 scale a row
    assert dict(sent) == {"0": str(80 * (64 + 256 + 16)), "1": str(80 * (64 + 512 + 16))}


def test_every_command_the_readme_names_exists():
    from thinwire.launch.cli import COMMANDS

    named = set(re.findall(r"thinwire (\w+)", "\n".join(blocks("sh"))))
    assert named
    assert named <= set(COMMANDS)


def test_every_file_the_readme_links_to_exists():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (Path(__file__).parents[2] / link).exists(), link
