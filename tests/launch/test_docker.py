"""What docker/ holds fits together, as far as that shows without an engine, a Kubernetes or a Slurm."""

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from thinwire.launch.recipe.recipe import packaged
from thinwire.pipeline.errors import OptionsError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
COMPOSE = yaml.safe_load((FOLDER / "docker-compose.yml").read_text())
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
STAGES = [f"stage{index}" for index in range(4)]


def default(text):
    """What Compose makes of ${NAME:-default} with no variable set."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", text)


# --- docker-compose.yml -------------------------------------------------------------------------------------------


def test_four_stages_differ_in_their_rank_alone():
    assert list(COMPOSE["services"]) == STAGES
    ranks = [service["environment"].pop("PET_NODE_RANK") for service in COMPOSE["services"].values()]
    assert ranks == ["0", "1", "2", "3"]
    first, *others = COMPOSE["services"].values()
    assert others == [first] * 3
    assert first["environment"]["PET_NNODES"] == str(len(STAGES))
    assert first["environment"]["PET_MASTER_ADDR"] == STAGES[0]


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_names_only_what_there_is(name):
    service = COMPOSE["services"][name]
    build = service["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).resolve() == FOLDER / "Dockerfile"
    assert set(build["args"]) == set(re.findall(r"^ARG (\w+)=", DOCKERFILE, flags=re.M))
    assert set(service["networks"]) <= set(COMPOSE["networks"])
    volumes = dict(volume.split(":")[:2] for volume in service["volumes"])
    assert set(volumes) <= set(COMPOSE["volumes"])
    assert set(volumes.values()) == {"/data", "/runs"}
    words = default(service["command"]).split()
    assert words[:3] == ["torchrun", "-m", "thinwire.launch.train"]
    assert words[3] in packaged()


def test_its_defaults_are_those_of_the_dockerfile():
    args = COMPOSE["services"]["stage0"]["build"]["args"]
    assert {name: default(value) for name, value in args.items()} == dict(
        re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, flags=re.M)
    )
    assert args["PIP_EXTRA_INDEX_URL"].startswith("${PIP_EXTRA_INDEX_URL-"), "set to nothing, it switches the index off"


@pytest.mark.parametrize("compose", ["docker-compose", "docker compose"])
def test_compose_reads_it(compose):
    if subprocess.run(f"{compose} version", shell=True, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip(f"needs {compose}")
    command = [*compose.split(), "--file", FOLDER / "docker-compose.yml", "config"]
    told = subprocess.run(
        command, env={**os.environ, "BANDWIDTH": "7mbit"}, capture_output=True, text=True, timeout=60, check=True
    )
    services = yaml.safe_load(told.stdout)["services"]
    assert {service["environment"]["BANDWIDTH"] for service in services.values()} == {"7mbit"}


def test_the_page_says_what_makes_the_image_large_and_the_default_is_the_small_one():
    [row] = [line for line in (FOLDER / "README.md").read_text().splitlines() if "`PIP_EXTRA_INDEX_URL`, " in line]
    assert "With `PIP_EXTRA_INDEX_URL=`, torch is that with CUDA, and the image has 6.8 GB" in row
    assert default(COMPOSE["services"]["stage0"]["build"]["args"]["PIP_EXTRA_INDEX_URL"]).endswith("/whl/cpu")
    assert len({service["image"] for service in COMPOSE["services"].values()}) == 1, "all containers share one image"


# --- the image ----------------------------------------------------------------------------------------------------


def test_the_image_is_given_all_packages_and_its_entry_point():
    copied = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"setup.cfg", "pyproject.toml", "compress", "models", "pipeline", "launch"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    (entry,) = re.findall(r'ENTRYPOINT \["python", "/opt/thinwire/(.*)"\]', DOCKERFILE)
    assert entry in copied


ENTRYPOINT = runpy.run_path(str(FOLDER / "entrypoint.py"))


@pytest.mark.parametrize(
    ("environment", "commands"),
    [
        ({}, []),
        ({"BANDWIDTH": "", "LATENCY": "", "LOSS": ""}, []),
        ({"BANDWIDTH": "none"}, []),
        (
            {"BANDWIDTH": "20mbit", "GLOO_SOCKET_IFNAME": "net1"},
            ["tc qdisc add dev net1 root handle 1: tbf rate 20000000bit burst 4000b latency 400ms"],
        ),
        ({"LATENCY": "5ms"}, ["tc qdisc add dev eth0 root handle 1: netem limit 100000 delay 5000us"]),
    ],
)
def test_what_a_container_limits(environment, commands):
    assert [" ".join(command) for command in ENTRYPOINT["limits"](environment)] == commands


def test_a_limit_that_cannot_be_read_is_one_sentence():
    with pytest.raises(OptionsError, match="a bandwidth must be like 500kbit"):
        ENTRYPOINT["limits"]({"BANDWIDTH": "fast"})


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv, to give privileges up"
)
def test_the_command_has_no_privilege_left():
    words = ENTRYPOINT["unprivileged"](["cat", "/proc/self/status"])
    # not every machine has the image's user
    here = ["65534" if word == "thinwire" else word.replace("--init-groups", "--clear-groups") for word in words]
    told = subprocess.run(here, capture_output=True, text=True, check=True, timeout=60)
    status = dict(line.split(":\t", 1) for line in told.stdout.splitlines())
    assert set(status["Uid"].split()) == {"65534"}
    assert {int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert status["NoNewPrivs"] == "1"


# --- more than one machine ----------------------------------------------------------------------------------------


def test_the_kubernetes_manifest_fits_together():
    service, claim, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    assert [part["kind"] for part in (service, claim, job)] == ["Service", "PersistentVolumeClaim", "Job"]
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert environment["PET_MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert spec["completions"] == spec["parallelism"] == int(environment["PET_NNODES"])
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
    assert container["args"][0] in packaged()


STUBS = {
    "scontrol": '[ "$*" = "show hostnames node[7-8]" ] && echo node7 && echo node8',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; for id in 0 1; do SLURM_NODEID=$id "$@"; done',
    "torchrun": 'echo "torchrun $*"',
}


def test_the_slurm_script_starts_a_torchrun_node_on_each_machine(tmp_path):
    for name, script in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}
    given = ["bash", FOLDER / "slurm.sh", "my recipe.yaml", "--training.steps", "7"]
    told = subprocess.run(
        given, env={**environment, "STAGES_PER_NODE": "2"}, capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.splitlines() == [
        f"torchrun --nnodes 2 --node-rank {rank} --nproc-per-node 2 --master-addr node7 --master-port 29500 "
        "-m thinwire.launch.train my recipe.yaml --training.steps 7"
        for rank in (0, 1)
    ]
    refused = subprocess.run(given[:2], env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 2
    assert refused.stderr.startswith("a recipe is needed")


# --- cuda.Dockerfile ----------------------------------------------------------------------------------------------


def instructions(text):
    """The instructions of a Dockerfile by their first word, without comments."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.M))
    found = {}
    for line in filter(None, joined.splitlines()):
        word, _, rest = line.partition(" ")
        found.setdefault(word, []).append(rest)
    return found


def test_the_image_for_gpus_differs_only_in_what_a_gpu_needs():
    plain, cuda = (instructions((FOLDER / name).read_text()) for name in ("Dockerfile", "cuda.Dockerfile"))
    for same in ("FROM", "HEALTHCHECK", "ENTRYPOINT", "CMD", "COPY"):
        assert plain[same] == cuda[same], same
    settings = [set(" ".join(found["ENV"]).split()) for found in (plain, cuda)]
    assert settings[1] - settings[0] == {
        *("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility", "NCCL_SOCKET_IFNAME=eth0"),
    }
    assert settings[0] < settings[1]
    # without an index of builds for the CPU, PyPI's torch is the one with CUDA
    assert set(cuda["ARG"]) - set(plain["ARG"]) == {"PIP_EXTRA_INDEX_URL="}
    before, after = (found["RUN"][-1] for found in (plain, cuda))
    assert after == before.replace(
        '"import torchvision"', "\"import torch, torchvision; assert torch.version.cuda, 'this torch has no CUDA'\""
    )
