"""Whole runs over ZeroMQ on real processes: the same losses and weights as simulated, whatever happens on the way."""

import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("zmq", reason="needs pyzmq")

from support.processes import run
from support.relay import Relay
from support.toy import train
from thinwire.pipeline.processes.zeromq import group
from thinwire.pipeline.processes.zeromq.connections import Patience
from thinwire.pipeline.processes.zeromq.keys import Keys
from thinwire.pipeline.processes.zeromq.mesh import Address, Mesh

pytestmark = pytest.mark.processes

OPTIONS = {
    "schedule": "1f1b-wan",
    "dropout": 0.2,
    "accumulation": 2,
    "compression": {"activations": "aqsgd(q(2))", "gradients": "ef(topk(0.25))"},
    "wire": {"transport": "zmq", "timeout": 60.0},
}
PATIENCE = Patience(heartbeat=0.2, silence=1.0, retry=0.02)


class Disturbed(Mesh):
    """A mesh that the others reach through a relay, which a thread disturbs as long as the process lives."""

    relay = None
    disturbances = 0

    def __init__(self, rank, keys, **options):
        super().__init__(rank, keys, **options)
        Disturbed.relay = Relay(self.address.endpoint)
        self.address = Address(Disturbed.relay.endpoint, self.address.life)
        threading.Thread(target=self._disturb, daemon=True).start()

    def _disturb(self):
        while True:
            time.sleep(0.1)
            if Disturbed.disturbances % 2:
                self._let_pass(2048)
            Disturbed.relay.cut()
            if Disturbed.disturbances % 5 == 4:
                Disturbed.relay.hush()
                time.sleep(2 * PATIENCE.silence)
                Disturbed.relay.go_on()
            Disturbed.disturbances += 1

    def _let_pass(self, nbytes):
        """Wait until a handshake and something more is through, however busy the machine is."""
        before = Disturbed.relay.passed
        while Disturbed.relay.passed < before + nbytes:
            time.sleep(0.01)


def over_zmq(target, keys, folder, mesh, rank, *args):
    """Call `target` where the only process group is one over ZeroMQ; and how often the connections were broken."""
    dist.barrier()  # gloo's start fails where the other process has left already
    dist.destroy_process_group()
    group.Mesh = mesh
    group.register()
    dist.init_process_group(
        "zmq",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        pg_options=group.MeshSettings(keys=keys, patience=PATIENCE),
    )
    result = target(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    return result, Disturbed.relay and Disturbed.relay.accepted


def trained(options, mesh=Mesh):
    """Losses and weights of a run on two processes, and how many connections its processes accepted."""
    with tempfile.TemporaryDirectory() as folder:
        results = run(partial(over_zmq, train, Keys.fresh(), Path(folder), mesh), 2, options)
    losses = next(result[0] for result, _ in results if result[0] is not None)
    weights = {stage: state for result, _ in results for stage, state in result[1].items()}
    return losses, weights, [accepted for _, accepted in results]


def assert_as_simulated(losses, weights, options):
    expected = train(0, options | {"simulated": True})
    assert losses == expected[0]
    assert sorted(weights) == sorted(expected[1])
    for stage, state in weights.items():
        for name, tensor in state.items():
            assert torch.equal(tensor, expected[1][stage][name]), f"stage {stage}, {name}"


def test_a_run_without_gloo_is_the_same_simulated(alone):
    losses, weights, _ = trained(OPTIONS)
    assert_as_simulated(losses, weights, OPTIONS)


@pytest.mark.parametrize("sync", [{}, {"every": 2}], ids=["every step", "every 2 steps"])
def test_replicas_without_gloo_are_the_same_simulated(alone, sync):
    options = OPTIONS | {"num_stages": 1, "replicas": 2, "exchange": "ef(q(4))", "sync": sync, "steps": 4}
    losses, weights, _ = trained(options)
    assert_as_simulated(losses, weights, options)


def test_a_run_over_connections_that_break_and_fall_silent_is_the_same(alone):
    """Every connection is reset up to ten times a second; now and then the relay passes on nothing for two silences."""
    options = OPTIONS | {"steps": 12}
    losses, weights, accepted = trained(options, Disturbed)
    assert min(accepted) > 2, accepted
    assert_as_simulated(losses, weights, options)
