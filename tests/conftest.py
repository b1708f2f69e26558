"""What all tests share. torch is imported where it is used: the process that only hands out the tests needs none."""

import datetime
import gc
import os
import random
import signal
from functools import cache

import pytest
from hypothesis import settings

from support import no_sync  # noqa: F401 - it acts when it is imported
from support.needs import left_out

# properties are tried on the same examples in every run, however slow the machine is
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


# Before its first program each process that compiles would try the vector instructions out, which takes three programs
# and three imports of torch, and then compile the headers by themselves, which pays from many programs on. torch reads
# both when it is imported, as tests/launch/conftest.py does before `pytest_configure`.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")


def pytest_configure(config):
    """Hide the GPUs of this machine from all but the tests that ask for one (`make test-gpu`)."""
    if "gpu" not in (config.option.markexpr or ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    """Files that start processes come first, then slow ones: they take longest."""
    import torch

    ranks = {item.path: 2 for item in items}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "gpu" in marks and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        rank = 0 if marks & {"processes", "namespaces"} else 1 if "slow" in marks else 2
        ranks[item.path] = min(ranks[item.path], rank)
    items.sort(key=lambda item: ranks[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported stays: the collector of garbage need not go through it time and again, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Two workers a core: processes that wait for each other leave a third of their time to others."""
    cores = len(os.sched_getaffinity(0))
    return cores if "not processes" in config.option.markexpr else 2 * cores


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep a file's tests on one worker, for what they share is made once there; and all files with hosts on one.

    Each test with hosts removes those that killed processes left, and some test just that. (Marks of groups do not
    serve: xdist 3.8 writes them into names that pytest 9.2 does not take from it.)
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FilesAndHosts(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "hosts" if has_hosts(config.rootpath / file) else file

    return FilesAndHosts(config, log)


@cache
def has_hosts(path):
    return "mark.namespaces" in path.read_text()


@pytest.fixture(autouse=True, scope="session")
def answers_ctrl_c():
    """A shell has what it starts in the background ignore SIGINT, and so would all that the tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_numbers():
    """A test draws the same random numbers whatever ran before it on its worker.

    `torch.manual_seed` would format the stack for each kind of device that is not there, which takes a millisecond.
    """
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)


@pytest.fixture
def alone():
    """A process group of this process only."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=30)
    )
    yield
    dist.destroy_process_group()


@pytest.fixture
def hub_cache(tmp_path_factory, monkeypatch):
    """What `datasets` keeps goes to a folder of the test, and nothing is looked for on the network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    return datasets


@pytest.fixture(scope="session")
def can_make_hosts():
    """Skip, with the reason, where there can be no network namespaces with tc."""
    from support.hosts import missing

    if reason := missing():
        pytest.skip(reason)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    """Close with what this machine could not run, a sentence for each cure."""
    reasons = [str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")]
    sentences = left_out(reasons)
    if sentences:
        terminalreporter.section("not run on this machine")
        for sentence in sentences:
            terminalreporter.write_line(sentence)
