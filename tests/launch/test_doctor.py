"""The doctor: true rows for this machine, and a row for whatever is missing, hangs or raises."""

import json
import os
import re
import resource
import shutil
import socket
import sys
import time
import types
from importlib import metadata
from pathlib import Path

import pytest

from thinwire.launch.doctor import command as doctor
from thinwire.launch.processes.reach import check_transport
from thinwire.launch.recipe import recipe
from thinwire.launch.shared import probes
from thinwire.pipeline.devices import device
from thinwire.pipeline.errors import OptionsError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc and interfaces")


@pytest.fixture
def no_commands(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


def fake_command(monkeypatch, folder, name, script):
    """Puts a shell script in front of PATH under a command's name."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_every_row_is_complete_and_says_what_to_do():
    findings = doctor.examine()
    assert list(findings) == list(doctor.PROBES)
    for name, finding in findings.items():
        assert finding.found, name
        assert doctor.PROBES[name][0], name
        assert finding.verdict == "ok" or finding.advice, finding
    assert findings["torch"].verdict == "ok", findings["torch"]
    assert findings["gloo"].verdict == "ok", findings["gloo"]
    assert findings["Python"].found.startswith("{}.{}.".format(*sys.version_info))


def test_supported_torch_is_what_setup_cfg_allows():
    (requirement,) = (line for line in metadata.requires("thinwire") if re.match(r"torch[<>=]", line))
    bounds = {tuple(map(int, pair)) for pair in re.findall(r"(\d+)\.(\d+)", requirement)}
    oldest, newest = probes.TORCH_OLDEST, probes.TORCH_NEWEST
    assert bounds == {oldest, (newest[0], newest[1] + 1)}, requirement


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.10.1", "missing"), ("2.11.0", "ok"), ("2.15.3+cu130", "ok"), ("2.16.0a0", "missing"), ("odd", "missing")],
)
def test_torch_versions(monkeypatch, version, verdict):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__=version))
    finding = probes.probe_torch()
    assert (finding.found, finding.verdict) == (version, verdict)


def test_missing_torch_is_rows_and_a_status(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch raises
    assert doctor.main(["--json"]) == 1
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["torch"]["verdict"] == "missing"
    assert rows["torch"]["advice"] == "install torch 2.11 to 2.15"
    assert [rows[name]["verdict"] for name in ("gloo", "NCCL", "GPUs")] == ["missing"] * 3
    assert rows["memory"]["verdict"] in ("ok", "limited")


@pytest.mark.parametrize(("name", "status"), [("torch", 1), ("gloo", 0), ("Docker", 0)])
def test_only_torch_decides_the_status(monkeypatch, capsys, name, status):
    found = dict.fromkeys(("torch", "gloo", "Docker"), probes.Finding("some"))
    monkeypatch.setattr(doctor, "examine", lambda: found | {name: probes.Finding("none", "missing", "y")})
    assert doctor.main([]) == status
    assert "missing" in capsys.readouterr().out


@pytest.mark.slow
def test_json_is_the_table(capsys):
    assert doctor.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(doctor.PROBES)
    assert all(set(row) == {"name", "found", "verdict", "needed_for", "advice"} for row in rows)
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in doctor.PROBES)


def test_found_text_is_not_read_as_markup(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    doctor.show([doctor.table({"disk": probes.Finding("[Errno 2] [/red] gone", "missing", "[bold]")})])
    printed = capsys.readouterr().out
    assert "[Errno 2] [/red] gone" in printed
    assert "[bold]" in printed


def test_missing_commands(no_commands):
    assert probes.probe_docker().verdict == "missing"
    assert probes.run("ip link") == (127, "ip: No such file or directory")
    findings = doctor.examine()
    assert all(findings[name].verdict != "missing" for name in ("torch", "memory"))


def test_hanging_command_is_given_up(monkeypatch):
    monkeypatch.setattr(probes, "COMMAND_SECONDS", 0.1)
    assert probes.run("sleep 30") == (124, "no answer from `sleep 30` within 0.1 s")


def test_probe_that_hangs_or_raises_is_a_row():
    assert doctor.bounded(lambda: time.sleep(30), seconds=0.1).found == "no answer within 0.1 s"
    assert doctor.bounded(lambda: 1 / 0) == (
        "ZeroDivisionError: division by zero",
        "missing",
        "fix what the error names",
    )
    assert doctor.bounded(probes.probe_open_files) == probes.probe_open_files()


def test_docker_client_is_not_an_engine(monkeypatch, tmp_path):
    fake_command(monkeypatch, tmp_path, "docker", "echo 28.1.0")
    assert probes.probe_docker() == ("engine 28.1.0", "ok", "")
    fake_command(monkeypatch, tmp_path, "docker", "echo; echo Cannot connect >&2; exit 1")
    assert probes.probe_docker().found == "client only: Cannot connect"
    assert probes.probe_docker().verdict == "missing"


def test_open_files_limit(monkeypatch):
    for soft, verdict in ((256, "limited"), (1024, "ok"), (resource.RLIM_INFINITY, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert probes.probe_open_files().verdict == verdict, soft


def test_memory_and_disk_are_this_machine_s():
    available, total = map(float, re.findall(r"[\d.]+", probes.probe_memory().found))
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert 0 < available <= total
    assert abs(total - physical) <= 0.1, (total, physical)
    assert float(probes.probe_disk().found.split()[0]) <= shutil.disk_usage(Path.cwd()).total / 2**30


def test_loopback_is_among_the_interfaces():
    known = probes.interface_addresses()
    assert "127.0.0.1" in known["lo"], known
    assert set(known) <= {name for _, name in socket.if_nameindex()}


KNOWN = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.0.2.2", "fe80::1"], "wg0": ["10.0.0.1"]}


@pytest.mark.parametrize(
    ("asked", "address", "found", "verdict", "advice"),
    [
        ("eth0", "127.0.0.1", "eth0 192.0.2.2", "ok", "to use wg0, set GLOO_SOCKET_IFNAME"),
        ("eth0,wg0", "127.0.0.1", "eth0 192.0.2.2, wg0 10.0.0.1", "ok", ""),
        ("eth0,", "127.0.0.1", "eth0 192.0.2.2", "ok", "to use wg0"),  # a run takes these two as well
        ("eth0:1", "127.0.0.1", "eth0 192.0.2.2", "ok", "to use wg0"),
        ("eht0", "192.0.2.2", "no address on eht0", "missing", "set GLOO_SOCKET_IFNAME to lo or eth0 or wg0"),
        ("eth0,eht0,x1", "192.0.2.2", "no address on eht0, x1", "missing", "lo or eth0 or wg0"),
        ("lo", "192.0.2.2", "lo 127.0.0.1: this host only", "limited", "here to eth0 or wg0"),
        ("", "192.0.2.2", "eth0 192.0.2.2", "ok", "to use wg0, set GLOO_SOCKET_IFNAME"),
        ("", "127.0.1.1", "lo 127.0.1.1: this host only", "limited", "here to eth0 or wg0"),
        ("", "10.9.9.9", "interface unknown 10.9.9.9", "ok", ""),
        ("e", "10.0.0.1", "wg0 10.0.0.1", "ok", ""),  # torch ignores a single letter
    ],
)
def test_interface(monkeypatch, asked, address, found, verdict, advice):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", asked)
    monkeypatch.setattr(probes, "interface_addresses", lambda: KNOWN)
    monkeypatch.setattr(probes, "host_address", lambda: address)
    finding = probes.probe_interface()
    assert (finding.found, finding.verdict) == (found, verdict)
    assert advice in finding.advice


def test_host_address_is_one_that_can_be_bound(monkeypatch):
    stranger = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("203.0.113.77", 0))
    ours = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [stranger, ours])
    assert probes.host_address() == "127.0.0.1"

    def unresolvable(*_, **__):
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", unresolvable)
    assert probes.host_address() == "127.0.0.1"


def test_gloo_agrees_about_interfaces(monkeypatch):
    """What the doctor calls missing is what gloo refuses, and what it calls usable gloo accepts."""
    from torch.distributed import ProcessGroupGloo

    present, known = {name for _, name in socket.if_nameindex()}, probes.interface_addresses()
    monkeypatch.setattr(probes, "interface_addresses", lambda: known)  # containers' interfaces come and go
    for name in known:
        ProcessGroupGloo.create_device(interface=name)
    without = sorted(present - set(known))
    for name in [*without, "nosuch0"]:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert probes.probe_interface().verdict == "missing"
        with pytest.raises(RuntimeError, match=name):
            ProcessGroupGloo.create_device(interface=name)
    ProcessGroupGloo.create_device(hostname=probes.host_address())


def pairs(capsys, *words, status=0):
    """The rows of `thinwire doctor RECIPE`: the pair, where it computes, what carries its frames, why."""
    assert doctor.main([*words, "--json"]) == status
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    return [((low, high), (one, other), by, why) for low, one, high, other, by, why in table["rows"]]


def test_each_pair_of_processes_of_a_recipe_has_a_transport_and_a_reason(capsys):
    on_auto = ["quickstart", "--training.device", "auto", "--wire.transport", "auto"]
    places = [f"GPU {gpu} of host {host}" for host in (0, 1) for gpu in (0, 1)]
    assert pairs(capsys, *on_auto, "--gpus", "2", "2") == [
        ((0, 1), (places[0], places[1]), "nccl", "two GPUs of one host"),
        ((1, 2), (places[1], places[2]), "gloo", "two hosts"),
        ((2, 3), (places[2], places[3]), "nccl", "two GPUs of one host"),
    ]
    assert [row[2:] for row in pairs(capsys, *on_auto, "--gpus", "1", "0")] == [
        ("gloo", "they share a GPU"),
        ("gloo", "process 2 computes on the CPU"),
        ("gloo", "process 2 computes on the CPU"),
    ]
    replicas = ["--replicas.count", "2", "--pipeline.num_stages", "2", "--wire.transport", "zmq"]
    assert [(pair, by) for pair, _, by, _ in pairs(capsys, "quickstart", *replicas, "--gpus", "0")] == [
        ((0, 1), "zmq"), ((2, 3), "zmq"), ((0, 2), "zmq"), ((1, 3), "zmq"),
    ]  # fmt: skip


def test_a_pair_without_a_transport_is_a_row_and_a_status(capsys):
    nccl = ["quickstart", "--wire.transport", "nccl"]
    rows = pairs(capsys, *nccl, "--gpus", "0", status=2)
    assert {row[2] for row in rows} == {"refused"}
    assert "needs a GPU in every process, and process 0 computes on the CPU" in rows[0][3]
    on_gpus = [*nccl, "--training.device", "cuda", "--gpus"]
    assert [row[2] for row in pairs(capsys, *on_gpus, "3")] == ["nccl"] * 3  # neighbours never share one of three
    assert [row[2] for row in pairs(capsys, *on_gpus, "1", "2", status=2)] == ["refused", "nccl", "nccl"]


def test_a_launcher_refuses_what_the_doctor_refuses_before_it_starts_a_process(monkeypatch):
    monkeypatch.setattr(device, "num_gpus", lambda: 1)
    for words, said in (
        ([], "process 0 computes on the CPU"),
        (["--training.device", "cuda"], "processes 0 and 1 share one of host 0; start fewer processes there"),
    ):
        with pytest.raises(OptionsError, match=said):
            check_transport(recipe.parse(["quickstart", "--wire.transport", "nccl", *words]))
    check_transport(recipe.parse(["quickstart", "--wire.transport", "auto"]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--training.device", "cuda", "--gpus", "1", "0"], "there is none on host 1; add --training.device auto"),
        (["--gpus", "1", "1", "1"], "hosts with as many processes each, got 3 hosts for 4"),
        (["--gpus", "-1"], "--gpus must be numbers of GPUs, got -1"),
    ],
)
def test_processes_that_cannot_be_placed_are_one_sentence(words, said):
    with pytest.raises(OptionsError, match=said):
        doctor.main(["quickstart", *words])
