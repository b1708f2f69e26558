"""Two stages on two hosts, 100 Mbit/s between them: what crosses the wire is what the meters say, and little else."""

import pytest

from support.commands import TORCHRUN, TRAIN, started
from support.hosts import WIRE, hosts
from support.run_files import numbers, summary
from support.wire_bytes import bytes_sent
from thinwire.launch import cli

pytestmark = [pytest.mark.namespaces, pytest.mark.usefixtures("can_make_hosts")]

STEPS = 5
RECIPE = f"""
model: {{config: {{vocab_size: 256, n_layer: 2, n_embd: 128, n_head: 2, n_positions: 128}}}}
data: {{name: pydoc, block_size: 128, held_out: 0.02}}
pipeline: {{num_stages: 2, num_microbatches: 4, microbatch_size: 8}}
compression: {{activations: q(8), gradients: none}}
optimizer: {{lr: 0.01, max_grad_norm: 1.0}}
training: {{steps: {STEPS}}}
"""

# Bytes of both interfaces that are no frames, all headers and acknowledgements included; measured like this test.
# Rendezvous (the store of rank 0, gloo's connections), comparing, reporting, ending: three runs of 0 steps with nothing
# held out sent 42,857, 43,694 and 41,963 bytes.
START_UP = 42_000
# Gathering the norm of the gradients: over 60 steps with frames of under a kilobyte, two runs with clipping sent 91,414
# and 89,194 bytes more than one without, 1,524 and 1,487 a step.
PER_STEP = 1_500

# Ethernet, IP and TCP take at least 54 of 1514 bytes. The rest of the ceiling is for the 12 bytes of TCP's timestamps,
# an acknowledgement of 66 bytes for every other packet (together 1.068), and about 440 bytes for every frame, in which
# gloo's two ends agree that they are ready (0.003 for frames of 131 kB).
LEAST, MOST = 1514 / 1460, 1.08


def test_the_wire_carries_the_metered_bytes_and_the_numbers_are_those_of_a_simulation(tmp_path, monkeypatch):
    (tmp_path / "wired.yaml").write_text(RECIPE)
    with hosts(2, "100mbit") as made:
        before = sum(bytes_sent(host) for host in made)

        def node(rank):
            where = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": made[0].address, "MASTER_PORT": "29500"}
            command = made[rank].command([TORCHRUN[0], *TRAIN, "wired.yaml", "--output", "wired"])
            return started(command, tmp_path, GLOO_SOCKET_IFNAME=WIRE, **where)

        with node(0) as first, node(1) as second:
            assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
        carried = sum(bytes_sent(host) for host in made) - before
    told = summary(tmp_path / "wired")

    ratio = (carried - START_UP - STEPS * PER_STEP) / told["bytes_sent"]
    assert told["bytes_sent"] > 10e6
    assert LEAST <= ratio <= MOST, f"{carried} bytes on the wire for {told['bytes_sent']} in frames: {ratio:.4f}"

    monkeypatch.chdir(tmp_path)
    assert cli.main(["simulate", "wired.yaml", "--output", "simulated"]) == 0
    assert numbers(tmp_path / "wired") == numbers(tmp_path / "simulated")
