"""Split learning over damaged links: right weights at both ends, or sentences, and no hang."""

import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from support.commands import THINWIRE, completed, free_port, started
from support.middle import DAMAGES, middle, missing
from support.run_files import summary
from thinwire.launch import cli

pytestmark = pytest.mark.namespaces

CASES, FIRST = int(os.environ.get("THINWIRE_TORN", "0")), int(os.environ.get("THINWIRE_FIRST_SEED", "0"))
"""How many cases, and the seed of the first, as `make torn` says; without them these two."""
SEEDS = range(FIRST, FIRST + CASES) if CASES else (4, 7)
"""A setting in the store twice; a reset, which zmq heals. Later bytes are of other messages on a busy machine."""
ENDS, LIMIT, BYTES = ("client", "server"), 240, 72_000
"""Who takes part, the seconds after which a run hangs, and about how many bytes it sends."""
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
MODEL = """
from torch.nn import Flatten, Linear, Sequential, Tanh


def layers():
    return Sequential(
        Sequential(Flatten(), Linear(64, 16), Tanh()),
        *(Sequential(Linear(16, 16), Tanh()) for _ in range(2)),
        Linear(16, 10),
    )
"""
RECIPE = """
model: {name: "small:layers"}
data: {name: digits, held_out: 0.03}
compression: {activations: "aqsgd(q(4))", gradients: "ef(q(8))"}
optimizer: {name: sgd, lr: 0.05, momentum: 0.9}
training: {steps: 4, evaluate_every: 3 steps}
checkpoint: {every: 2 steps}
wire: {timeout: 20, heartbeat: 8}
"""
PIPELINES = {
    "client": "{num_stages: 4, layers: [1, 1, 1, 1], schedule: zbv-zero-bubble, stages_per_process: 2, "
    "num_microbatches: 2, microbatch_size: 8}",
    "server": "{num_stages: 2, layers: [1, 3], schedule: 1f1b, num_microbatches: 2, microbatch_size: 8}",
}
"""Who has the labels -> the pipeline."""


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("links")
    with pytest.MonkeyPatch.context() as patch, middle() as between:
        patch.chdir(folder)
        (folder / "small.py").write_text(MODEL)
        expected = {}
        for labels, pipeline in PIPELINES.items():
            (folder / f"{labels}.yaml").write_text(f"{RECIPE}pipeline: {pipeline}\n")
            told = ["--labels"] if labels == "server" else []
            assert cli.main(["outline", f"{labels}.yaml", "--to", f"{labels}.json", *told]) == 0
            assert cli.main(["simulate", f"{labels}.yaml", "--output", f"{labels}-alone"]) == 0
            expected[labels] = summary(folder / f"{labels}-alone")["weights_digest"]
        # the first command takes longest: what all are forks of begins
        assert completed([*THINWIRE, "keys", "run.keys"], folder).status == 0
        yield folder, between, expected


def go(folder, between, labels, transport, strike):
    """Statuses of client and server, None for one that hangs, and the commands; `strike` gets these first."""
    for end in ENDS:
        shutil.rmtree(folder / f"run-{end}", ignore_errors=True)
    words = ["ip", "netns", "exec", between.name, *THINWIRE, "train", f"{labels}.yaml"]
    words += ["--wire.transport", transport, *(["--wire.keys", "run.keys"] if transport == "zmq" else [])]
    environment = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    of_client = [*words, "--output", "run-client"]
    of_server = [*words, "--output", "run-server", "--data.outline", f"{labels}.json"]
    deadline = time.monotonic() + LIMIT
    with (
        started(of_client, folder, RANK=0, **environment) as client,
        started(of_server, folder, RANK=1, **environment) as server,
    ):
        strike(client, server)
        statuses = []
        for one in (client, server):
            try:
                statuses.append(one.process.wait(max(deadline - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                statuses.append(None)
    between.end_all()
    return statuses, (client, server)


def case(folder, between, seed, expected):
    """What happened in a case, and what is wrong with it."""
    draw = random.Random(seed)
    labels, transport = ("client", "server")[seed % 2], ("gloo", "zmq")[seed // 2 % 2]
    damage, victim = draw.choice((*DAMAGES, *SIGNALS)), draw.randrange(2)
    at = int(draw.choice((draw.random() * BYTES, draw.random() * 4096, draw.random() * 16384)))
    begun = time.monotonic()

    def strike(*commands):
        def end():
            for pid in commands[victim].processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, SIGNALS[damage])

        between.prepare(end if damage in SIGNALS else damage, at, seed)

    statuses, commands = go(folder, between, labels, transport, strike)
    wrong = []
    for end, (name, status, command) in enumerate(zip(ENDS, statuses, commands, strict=True)):
        said = [line for line in command.stderr.splitlines() if line.strip()]
        if damage in SIGNALS and end == victim and between.damaged:
            continue
        if status is None:
            wrong.append(f"{name} hangs")
        elif status == 0:
            if name == labels and summary(folder / f"run-{name}")["weights_digest"] != expected[labels]:
                wrong.append(f"{name} has other weights")
        elif status != 1 or any("Traceback" in line for line in said) or not said:
            wrong.append(f"{name} ends with {status} and {len(said)} lines")
    story = (
        f"{seed}: {damage} at byte {at} of {transport}, labels at the {labels}, "
        f"{ENDS[victim] if damage in SIGNALS else between.damaged}: {statuses} in {time.monotonic() - begun:.0f} s, "
        f"{between.passed} bytes"
    )
    return story, wrong, [command.stderr for command in commands]


def test_damage_on_the_way_is_told_or_changes_nothing(machines):
    folder, between, expected = machines
    wrong = []
    for seed in SEEDS:
        story, found, errors = case(folder, between, seed, expected)
        print(story, *found, sep="\n  ")
        wrong += [f"{story}\n  {each}\n{''.join(errors)}" for each in found]
    assert not wrong, "\n".join(wrong)
