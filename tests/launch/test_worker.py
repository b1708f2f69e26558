"""What a stage process says where it cannot join the others."""

import fcntl
import random
import resource
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from support.commands import free_port
from thinwire.launch.folder.policy import mark
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.processes import rendezvous, worker
from thinwire.launch.processes.rendezvous import damage, join, of_this_start
from thinwire.launch.recipe import recipe
from thinwire.launch.shared import variables
from thinwire.launch.shared.control_groups import allow_many_files
from thinwire.pipeline.errors import MismatchError, OptionsError, PeerError
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.options.replicas import ReplicaOptions, SyncOptions
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement


def prepared(num_processes, timeout=10, **replicas):
    wire = WireOptions(timeout=timeout)
    return SimpleNamespace(
        recipe=SimpleNamespace(num_processes=num_processes, wire=wire, replicas=ReplicaOptions(**replicas))
    )


def test_a_port_in_use_is_named_with_what_to_set(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        given = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(MismatchError) as caught:
            join(prepared(2), rank=0)
    assert str(caught.value) == (
        f"the port of the rendezvous must be free, but another program uses {port}; set MASTER_PORT to another "
        "one (torchrun: --master-port), the same on every machine"
    )


@pytest.mark.slow
def test_a_host_that_takes_connections_and_is_silent_is_named(monkeypatch):
    """As a process that was stopped while the run began, or a tunnel without an end: torch waited for ever."""
    monkeypatch.setattr(rendezvous, "_LATER", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        given = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{port} takes connections, and says nothing"):
            join(prepared(2, timeout=0.5), rank=1)


@pytest.mark.slow
def test_a_store_that_falls_silent_behind_the_rendezvous_is_named(monkeypatch):
    """The answer to a cancelled wait never came where a link had fallen silent: torch waited without limit."""
    monkeypatch.setattr(rendezvous, "_LATER", 0.5)
    monkeypatch.setattr(dist, "init_process_group", lambda **given: threading.Event().wait())
    given = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(PeerError, match=r"the store at 127\.0\.0\.1:\d+ takes connections, and says nothing"):
        join(prepared(1, timeout=0.5), rank=0)


def started(store, generation, rank, said):
    """One process of a start: it tells the others a value, and notes what it hears from them."""
    mine = of_this_start(store, rank, 3, timedelta(seconds=30))
    mine.set(str(rank), f"{generation} {rank}")
    said[generation, rank] = [mine.get(str(other)).decode() for other in range(3)]


@pytest.mark.slow
def test_what_an_earlier_start_left_in_the_store_is_not_read():
    """torchrun keeps its store over restarts: gloo called the addresses of the processes that were gone."""
    store, said = dist.HashStore(), {}
    for generation in range(4):
        threads = [threading.Thread(target=started, args=(store, generation, rank, said)) for rank in range(3)]
        random.Random(generation).shuffle(threads)
        for thread in threads:
            thread.start()
            thread.join(0.1)
        for thread in threads:
            thread.join(30)
        for rank in range(3):
            assert said[generation, rank] == [f"{generation} {other}" for other in range(3)]


def test_who_does_not_come_is_named():
    with pytest.raises(dist.DistStoreError, match=r"no word of 1, 2 within 0.1 s"):
        of_this_start(dist.HashStore(), 0, 3, timedelta(seconds=0.1))


def test_a_length_that_was_damaged_in_the_file_of_the_rendezvous_is_told(tmp_path):
    """torch waits without end for the rest of the word: no time-out of a run ended it."""
    path = tmp_path / "rendezvous"
    assert damage(path) == ""
    store = dist.FileStore(str(path), 2)
    store.set("name", "x" * 100)
    assert damage(path) == ""
    whole = path.read_bytes()
    for bit in range(32):
        changed = bytearray(whole)
        changed[whole.index(b"x") - 4 + bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        said = damage(path)
        assert said.startswith(f"the rendezvous of a run must hold what its stages wrote, but {path} was damaged"), bit
    with path.open("rb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        assert damage(path) == "", "a process that writes has not written all"
    path.write_bytes(whole)  # the store reads it again when it goes


def test_a_stage_may_open_as_many_files_as_the_system_allows():
    """Strangers held connections at a port of ZeroMQ, and the run had no file left for its next checkpoint."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    try:
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("every", "seconds"), [(1, 10), (50, 500)])
def test_all_processes_wait_for_a_replica_that_steps_alone_as_its_counterparts_do(
    tmp_path, monkeypatch, every, seconds
):
    """A save between two exchanges ended the run, because a slower replica was not there within `wire.timeout`."""
    given = {"WORLD_SIZE": 1, variables.RENDEZVOUS: tmp_path / "rendezvous"}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    join(prepared(1, count=2, sync=SyncOptions(every=every)), rank=0)
    try:
        group = dist.distributed_c10d._get_default_group()
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=seconds)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("process_of", "replicas", "here", "said"),
    [
        ({0: 0, 1: 1}, 1, range(1), "stage 0 is"),
        ({0: 0, 1: 0, 2: 1}, 1, range(1), "stages 0 and 1 are"),
        ({0: 0}, 4, range(2, 4), "stage 0 of replica 2 and stage 0 of replica 3 are"),
        ({0: 0, 1: 1}, 2, range(2, 4), "stages 0 and 1 of replica 1 are"),
    ],
    ids=["one stage", "two stages", "two replicas", "one replica"],
)
def test_a_host_without_results_names_what_it_held(process_of, replicas, here, said, monkeypatch, capsys):
    where = Placement(process_of, num_replicas=replicas)
    monkeypatch.setattr(worker, "processes_here", lambda rank: here)
    monkeypatch.setattr(worker, "is_spread", lambda rank: True)
    worker._say_done(SimpleNamespace(recipe=SimpleNamespace(folder="run")), where, here.start)
    assert capsys.readouterr().out == f"{said} done; what this host keeps is in run\n"


@pytest.mark.parametrize(
    ("here", "spread", "says"), [(range(1, 2), True, True), (range(2), True, False), (range(1, 2), False, False)]
)
def test_the_host_with_the_results_says_that_others_keep_weights_too(here, spread, says, monkeypatch, capsys):
    """It said that everything is in its folder; the export then named a file that is missing."""
    monkeypatch.setattr(worker, "processes_here", lambda rank: here)
    monkeypatch.setattr(worker, "is_spread", lambda rank: spread)
    worker._say_done(SimpleNamespace(recipe=SimpleNamespace(folder="run")), Placement({0: 0, 1: 1}), 1)
    assert ("each host keeps the weights of its own stages" in capsys.readouterr().out) == says


@pytest.mark.parametrize(
    ("others", "renamed"),
    [
        ([True, False, True, None], True),
        ([True, True, True, None], False),
        ([False, True, True, None], True),
        ([True, True, False, None], False),
    ],
    ids=["before it began", "after it began", "in another run", "a host that came back with another command"],
)
def test_a_run_that_torchrun_starts_again_goes_on_if_it_had_begun_anew(tmp_path, monkeypatch, others, renamed):
    """With --overwrite, each restart threw away what the run had done."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    wanted = recipe.parse(["quickstart", "--output", str(tmp_path / "run"), "--overwrite"])
    mark(wanted.folder, "1")
    (wanted.folder / "summary.json").write_text("{}")
    monkeypatch.setattr(collectives, "everyone", lambda where, mine: [mine, others])
    monkeypatch.setattr(collectives, "barrier", lambda where, what: None)
    found = worker.as_started(Prepared(wanted, None, None, (), None, (), None), Placement({0: 0, 1: 1}))
    assert found.recipe.checkpoint.resume == "auto"
    assert (tmp_path / "run.1").exists() == renamed


def test_hosts_of_which_one_begins_anew_are_refused(tmp_path, monkeypatch):
    """One asked for checkpoints where the other waited for a folder to be moved away, for as long as anybody waits."""
    wanted = recipe.parse(["quickstart", "--output", str(tmp_path), "--overwrite"])
    monkeypatch.setattr(collectives, "everyone", lambda where, mine: [[False, False, False, None], mine])
    with pytest.raises(OptionsError) as caught:
        worker.as_started(Prepared(wanted, None, None, (), None, (), None), Placement({0: 0, 1: 1}))
    assert str(caught.value) == (
        "checkpoint.resume must be never in all processes or in none, got it in process 1 and not in process 0; give "
        "--overwrite on every host, or on none"
    )
