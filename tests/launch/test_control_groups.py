"""The limits of nested control groups: the smallest on the way to the root counts."""

import os

import pytest

from thinwire.launch.shared import control_groups
from thinwire.launch.shared.control_groups import cores, free_memory, machine_memory
from thinwire.launch.shared.probes import GIB, probe_cores, probe_memory

KB = 1024


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Writes files of a machine with 1000 kB of memory, 24 kB of swap and 8 cores: name -> text."""
    for name in ("meminfo", "membership"):
        monkeypatch.setattr(control_groups, name.upper(), tmp_path / name)
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    write(meminfo="MemTotal:  1000 kB\nMemAvailable:  500 kB\nHugePages_Total:  0\nSwapTotal:  24 kB\n")
    return write


def test_without_groups_the_memory_is_that_of_the_machine(machine, tmp_path):
    assert (machine_memory(), free_memory(), cores()) == (1024 * KB, (500 * KB, 1000 * KB), 8)
    (tmp_path / "meminfo").unlink()
    assert (machine_memory(), free_memory()) == (None, None)
    assert probe_memory().verdict == "limited"


def test_the_smallest_limit_of_nested_groups_of_version_2_counts(machine):
    """Only the outermost group was looked at: 25 GB under a limit of 1.4."""
    machine(membership="0::/job/step\n", job__step__memory_DOT_max="max\n", job__memory_DOT_max=f"{100 * KB}\n")
    assert machine_memory() == 124 * KB, "the limit of its memory is without swap"
    machine(job__step__memory_DOT_swap_DOT_max="0\n")
    assert machine_memory() == 100 * KB
    machine(memory_DOT_max=f"{50 * KB}\n")
    assert machine_memory() == 50 * KB
    machine(memory_DOT_max="max\n", job__memory_DOT_current=f"{70 * KB}\n")
    machine(job__memory_DOT_stat=f"anon 5\ninactive_file {10 * KB}\n")
    assert free_memory() == (40 * KB, 100 * KB)
    machine(job__cpu_DOT_max="250000 100000\n", job__step__cpu_DOT_max="max 100000\n")
    assert cores() == 2
    machine(cpu_DOT_max="50000 100000\n")
    assert cores() == 1


def test_the_smallest_limit_of_nested_groups_of_version_1_counts(machine):
    machine(membership="4:memory:/job/step\n3:cpu,cpuacct:/job\n0::/elsewhere\n")
    machine(memory__memory_DOT_limit_in_bytes="9223372036854771712\n")
    machine(memory__job__step__memory_DOT_limit_in_bytes=f"{100 * KB}\n")
    assert machine_memory() == 124 * KB
    machine(memory__job__memory_DOT_memsw_DOT_limit_in_bytes=f"{110 * KB}\n")
    assert machine_memory() == 110 * KB
    machine(memory__job__step__memory_DOT_usage_in_bytes=f"{70 * KB}\n")
    machine(memory__job__step__memory_DOT_stat=f"cache 5\ntotal_inactive_file {10 * KB}\n")
    assert free_memory() == (40 * KB, 100 * KB)
    machine(cpu__job__cpu_DOT_cfs_quota_us="300000\n", cpu__job__cpu_DOT_cfs_period_us="100000\n")
    machine(cpu__cpu_DOT_cfs_quota_us="-1\n", cpu__cpu_DOT_cfs_period_us="100000\n")
    assert cores() == 3


def test_the_probes_tell_what_this_process_may_have(machine):
    machine(membership="0::/\n", memory_DOT_max=f"{3 * GIB}\n", memory_DOT_current=f"{GIB}\n")
    machine(memory_DOT_stat="inactive_file 0\n", cpu_DOT_max="100000 100000\n")
    machine(meminfo="MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    assert probe_memory().found == "2.0 of 3.0 GiB"
    assert probe_cores().found == f"1 of {os.cpu_count()}"
