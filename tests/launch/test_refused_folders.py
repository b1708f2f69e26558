"""Folders that a command cannot take, read or resume: one sentence, and nothing there changes."""

import errno
from contextlib import chdir

import pytest

from support.hostile import snapshot
from support.recipe_runs import simulate
from support.tiny_run import write_recipe
from thinwire.launch import cli
from thinwire.launch.folder import policy
from thinwire.launch.recipe import recipe
from thinwire.launch.shared import scratch

pytestmark = pytest.mark.slow

EVERY = ["--checkpoint.every", "1 steps"]
DISK = ["--codec", 'aqsgd(q(4), store="disk")/q(8)']
NEW_OR_OWN = "output must name a new folder or a run's folder, because a run replaces files there: "
AWAY = "; move that away, or name another folder\n"
RENAMED = f"; {policy._WAY_OUT}\n"
SOMEBODYS = [
    *("model/net.py", "tensorboard/mine", "weights/step-00000002/mine", "model"),
    *("loss.png", "recipe.yaml", "summary.json", "evaluations.jsonl", "metrics.jsonl"),
]
"""Files in folders that no run made, under names that a run gives its own."""


def own(name):
    """The folder of the test in which there is such a file."""
    return f"somebodys/{SOMEBODYS.index(name)}"


def no_run_made(name):
    path = f"{own(name)}/{name.removesuffix('/mine') if name.startswith('weights') else name}"
    return f"{path} is no folder" if name == "model" else f"no run made {path}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs, their checkpoints, and what is somebody else's; no command below may change any of it."""
    made = tmp_path_factory.mktemp("place")
    write_recipe(made)
    names = [f"{own(name)}/{name}" for name in SOMEBODYS]
    for name in [*names, "file", "in-base/base/img", "in-1/step-00000001/img", "in-12/step-00000012/img"]:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("mine")
    for name in ("bare", "empty"):
        (made / name).mkdir()
    with chdir(made):
        for run, *options in ([".", *EVERY], ["noted", *EVERY], ["run"], ["run-smoke"]):
            simulate("tiny.yaml", run, *options)
    (made / "noted/notes.txt").write_text("mine")
    return made


RUN = ["simulate", "tiny.yaml", "--output"]
REFUSED = {
    # --- where a run would write
    **{
        f"a run, {command}": (
            [command, "tiny.yaml", "--output", "run"],
            "output must name a folder without a run, but run holds one; --overwrite renames it, --output DIR keeps "
            "both; --resume run is not possible, because the run has no checkpoint\n",
        )
        for command in ("train", "simulate")
    },
    "a run, for a smoke run": (
        [*RUN, "run", "--smoke"],
        "a smoke run must not replace run-smoke, which holds another run",
    ),
    "beneath a file": (
        ["simulate", "quickstart", "--output", "file/run"],
        "output must name a folder that can be written, got file/run: Not a directory",
    ),
    "stores in a file": (
        [*RUN, "empty", *DISK, "--compression.store_folder", "file"],
        "compression.store_folder must name a folder that can be written, got file",
    ),
    "stores of an evaluation in the kernel's": (
        ["eval", "tiny.yaml", *DISK, "--compression.store_folder", "/proc/self"],
        "compression.store_folder must name a folder that can be written, got /proc/self: ",
    ),
    **{
        f"no run made {name}{more}": (
            ["simulate", "gpt2-tiny", "--output", own(name), *more],
            NEW_OR_OWN + no_run_made(name) + AWAY,
        )
        for name in SOMEBODYS
        for more in ([], ["--overwrite"])
    },
    **{
        f"no room for checkpoints in {folder}": (
            [*RUN, "empty", "--checkpoint.folder", folder, *EVERY],
            f"checkpoint.folder must name a folder where checkpoints have room: no run made {folder}/{name}/img{AWAY}",
        )
        for folder, name in (("in-base", "base"), ("in-1", "step-00000001"), ("in-12", "step-00000012"))
    },
    # --- what --overwrite would rename
    "around others": ([*RUN, ".", *EVERY, "--overwrite"], "--overwrite renames ., but no run made "),
    "with notes": (
        [*RUN, "noted", *EVERY, "--overwrite"],
        f"--overwrite renames noted, but no run made noted/notes.txt{RENAMED}",
    ),
    "where the new run begins": (
        [*RUN, "run", *EVERY, "--model.weights", "run/weights", "--overwrite"],
        f"--overwrite renames run, but the new run begins with run/weights{RENAMED}",
    ),
    "with checkpoints of another": (
        [*RUN, "run", *EVERY, "--checkpoint.folder", "noted/checkpoints", "--overwrite"],
        "--overwrite needs a checkpoint.folder without checkpoints, but noted/checkpoints has some; name another one, "
        "or move them away\n",
    ),
    # --- what goes on
    "nothing to resume": (["simulate", "--resume", "nowhere"], "--resume must name the folder of a run"),
    "no checkpoint to resume": (["simulate", "--resume", "run"], "--resume needs a whole checkpoint"),
    # --- what is exported, and where to
    "nothing to export": (
        ["export", "nowhere", "--to", "new"],
        "RUN must be the folder of a run, got nowhere, which does not exist\n",
    ),
    "no weights to export": (
        ["export", "bare", "--to", "new"],
        "RUN must be the folder of a run that has saved weights, got bare; ",
    ),
    "an export to a file": (
        ["export", "run", "--to", "file"],
        "--to must name a new or empty folder, got file, a file\n",
    ),
    "an export beneath a file": (
        ["export", "run", "--to", "file/beneath"],
        "--to must name a folder that can be written, got file/beneath: PLACE/file cannot\n",
    ),
    # the kernel's own folders look as if they could be written; it was a traceback
    "an export to the kernel's": (
        ["export", "run", "--to", "/proc/export"],
        "--to must name a folder that can be written, got /proc/export: No such file or directory\n",
    ),
    "an export into a run": (
        ["export", "run", "--to", "run"],
        "--to must name a new or empty folder, got run, which is not empty\n",
    ),
}
"""What is asked, and how the sentence begins; PLACE is where all of it is."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_cannot_be_taken_is_one_sentence_and_stays_as_it_is(place, monkeypatch, capsys, name):
    """A run whose folder was that of a project deleted the project's model; a second run replaced the first."""
    words, said = REFUSED[name]
    monkeypatch.chdir(place)
    before = snapshot(place)
    capsys.readouterr()
    assert cli.main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(said.replace("PLACE", str(place))) and told.err.count("\n") == 1, told
    assert snapshot(place) == before


@pytest.mark.parametrize("text", ["a: [", "[]", "debug: 3"])
def test_a_smoke_run_replaces_no_run_with_a_damaged_recipe(folder, text):
    """Each was a traceback."""
    smoke = recipe.parse(["tiny.yaml", "--output", "run", "--smoke"])
    assert policy.replacing(smoke) is None
    policy.mark(smoke.folder, "")
    (smoke.folder / "summary.json").write_text("{}")
    (smoke.folder / "recipe.yaml").write_text(text)
    assert "a smoke run must not replace" in policy.replacing(smoke)


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_a_folder_that_may_not_be_read_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys, command):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(scratch, "lock", refused)
    assert cli.main([command, "gpt2-tiny", "--output", str(tmp_path)]) == 2
    said = f"output must name a folder that can be read, got {tmp_path}: Permission denied\n"
    assert capsys.readouterr().err == said
