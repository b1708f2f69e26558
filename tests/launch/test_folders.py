"""The folder of a run: held by one run at a time, and room in it."""

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from support.recipe_runs import SHORT, TINY
from support.small_disk import mounted
from thinwire.compress.stores.marks import claim
from thinwire.errors.files import MARK
from thinwire.launch import cli
from thinwire.launch.run import folders, recipe, room
from thinwire.launch.run.fields import read_fields
from thinwire.launch.run.folders import check_folders, held, mark, replacing
from thinwire.launch.run.model_files import save_model_files
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.run.room import Room
from thinwire.launch.run.weights import newest
from thinwire.launch.shared import scratch
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import CheckpointOptions, CompressionOptions

pytestmark = pytest.mark.slow

HOLDING = """
import sys, time
from pathlib import Path
from thinwire.launch.shared import scratch
held = scratch.lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(folders, "_PATIENCE", 0.2)


def test_a_folder_is_waited_for_that_the_stages_of_a_killed_launcher_still_hold(tmp_path, monkeypatch):
    """The same command at once was refused now and then: stages notice the end of their launcher after a while."""
    descriptor, turns = scratch.lock(tmp_path), []

    def wait(seconds):
        turns.append(seconds)
        if len(turns) == 5:
            os.close(descriptor)

    monkeypatch.setattr(folders, "_PATIENCE", 60)
    # of this module alone: other threads sleep too
    monkeypatch.setattr(folders, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    with held(tmp_path):
        assert len(turns) == 5


def test_a_folder_is_held_until_its_holder_is_dead(tmp_path):
    """Two runs wrote into one folder, both ended well, and the weights of one were gone."""
    with subprocess.Popen([sys.executable, "-c", HOLDING, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(OptionsError, match=r"no other run uses, but a run writes to .* now; wait"):
                held(tmp_path).__enter__()
        finally:
            holder.kill()
    with held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_inherits_the_folder_holds_it_too(tmp_path):
    with held(tmp_path) as descriptor:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[descriptor])
    with pytest.raises(OptionsError), held(tmp_path):
        pass
    child.communicate(b"\n")
    with held(tmp_path):
        pass


def test_a_command_that_only_looks_whether_a_folder_is_free_keeps_no_run_from_it(tmp_path, monkeypatch):
    """Two commands that began in one moment could refuse each other."""
    first, second = scratch.lock(tmp_path, alone=False), scratch.lock(tmp_path, alone=False)
    os.close(first)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: os.close(second))
    monkeypatch.setattr(folders, "time", clock)
    with held(tmp_path), pytest.raises(BlockingIOError):
        scratch.lock(tmp_path, alone=False)


def test_a_folder_that_may_not_be_read_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(scratch, "lock", refused)
    assert cli.main(["train", "gpt2-tiny", "--output", str(tmp_path)]) == 2
    said = f"output must name a folder that can be read, got {tmp_path}: Permission denied\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    "name",
    [
        *("model/net.py", "tensorboard/mine", "trace/stages.txt", "weights/step-00000002/mine", "model"),
        *("loss.png", "recipe.yaml", "summary.json", "evaluations.jsonl", "metrics.jsonl"),
    ],
)
def test_what_no_run_wrote_is_not_deleted(tmp_path, monkeypatch, capsys, name, overwrite):
    """A run whose folder was that of a project deleted the project's model without a word."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("mine")
    assert cli.main(["simulate", "gpt2-tiny", "--output", ".", *overwrite]) == 2
    said = name if name != "weights/step-00000002/mine" else "weights/step-00000002"
    assert capsys.readouterr().err == (
        "output must name a new folder or that of a run, because a run replaces files there: "
        + ("model is no folder" if name == "model" else f"no run made {said}")
        + "; move that away, or name another folder\n"
    )
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [tmp_path / name.partition("/")[0]]


@pytest.mark.parametrize("inside", ["weights", "best/again", "replaced", "checkpoints/more/again"])
def test_a_run_within_what_another_run_removes_is_refused(folder, tmp_path, capsys, inside):
    """It was trained, and gone when the other run saved or was replaced."""
    folders.mark(tmp_path / "outer", "1")
    assert cli.main(["simulate", "tiny.yaml", "--output", f"outer/{inside}"]) == 2
    inner = tmp_path / "outer" / inside.partition("/")[0]
    assert capsys.readouterr().err == (
        f"output must name a new folder or that of a run, because a run replaces files there: {inner} belongs to the "
        f"run in {tmp_path}/outer; move that away, or name another folder\n"
    )
    for field in ("checkpoint.folder", "compression.store_folder"):
        options = ["--output", "mine", "--checkpoint.every", "1 steps", f"--{field}", f"outer/{inside}"]
        assert cli.main(["simulate", "tiny.yaml", *options]) == 2
        assert capsys.readouterr().err == (
            f"{field} must name a folder that no other run removes: {inner} belongs to the run in {tmp_path}/outer; "
            f"name another folder\n"
        )
    assert [path.name for path in (tmp_path / "outer").rglob("*") if path.is_dir()] == ["weights"], "none was made"
    assert cli.main(["simulate", "tiny.yaml", "--output", "outer/again"]) == 0


def test_an_export_within_what_a_run_removes_is_refused(tmp_path, capsys):
    """The next --resume removed it with the rest of model/."""
    claim(tmp_path, "0af3")
    claim(tmp_path / "model", "0af3")
    assert cli.main(["export", str(tmp_path), "--to", str(tmp_path / "model/out")]) == 2
    assert capsys.readouterr().err == (
        f"--to must name a folder that no run removes: {tmp_path}/model belongs to the run in {tmp_path}; name another "
        f"folder\n"
    )


def test_files_beside_those_of_a_run_stay(folder, tmp_path):
    """A run removed every *.part, weights/step-N and replica-N, and took any metrics-N.jsonl for its own."""
    options = ["--output", ".", "--save_every", "1", "--checkpoint.every", "1 steps"]
    names = ("film.part", "weights/film.part", "replica-1/x", "step-12/x", "base/img", "metrics-2024.jsonl", "stores/x")
    names += ("checkpoints/step-12/img", "checkpoints/passed-over-00000009/x", "checkpoints/film.part")
    assert cli.main(["simulate", "tiny.yaml", *options]) == 0
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    for more in (["--training.steps", "3"], ["--overwrite"]):
        assert cli.main(["simulate", "tiny.yaml", *options, *more]) == 0
        assert {name: (tmp_path / name).read_text() for name in names} == dict.fromkeys(names, "mine")


def test_a_run_that_is_killed_while_it_replaces_the_model_can_start_again(tmp_path):
    """It deleted the file by which a run knows its own folder, maybe before the others."""

    def killed(folder):
        assert {path.name for path in folder.iterdir()} == {"facts.json", MARK}
        raise KeyboardInterrupt

    claim(tmp_path / "model", "")
    for name in ("facts.json", "config.json", "tokenizer/vocabulary"):
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "model" / name).touch()
    blueprint = SimpleNamespace(tied={}, dtype="float32", trained=None, inside="", save_config=killed)
    prepared = SimpleNamespace(
        blueprint=blueprint,
        data=SimpleNamespace(num_labels=None, classes=None),
        recipe=SimpleNamespace(data=SimpleNamespace(tokenizer="bytes")),
    )
    with pytest.raises(KeyboardInterrupt):
        save_model_files(tmp_path, prepared)
    assert folders.foreign(Recipe(output=str(tmp_path))) == []


def test_a_second_run_is_refused_before_torch_is_imported(tmp_path, monkeypatch, capsys):
    def read(group, values, where="", checked=True):
        assert not checked, "the checks of options import torch"
        return read_fields(group, values, where, checked)

    monkeypatch.setattr(recipe, "read_fields", read)
    monkeypatch.chdir(tmp_path)
    used = tmp_path / "runs" / "gpt2-tiny"
    for command, suffix in (("train", ""), ("simulate", "-simulated")):
        folder = used.with_name(used.name + suffix)
        folder.mkdir(parents=True)
        with held(folder):
            assert cli.main([command, "gpt2-tiny"]) == 2
            said = capsys.readouterr().err
            assert said.startswith("output must name a folder that no other run uses") and said.count("\n") == 1
        mark(folder, "")
        (folder / "summary.json").write_text("{}")
        assert cli.main([command, "gpt2-tiny"]) == 2
        assert f"but runs/{folder.name} holds one; --overwrite replaces it" in capsys.readouterr().err


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")


@needs_root
def test_a_folder_of_stores_that_takes_nothing_is_told_before_training(tmp_path):
    with mounted(tmp_path / "disk", "ro") as disk:
        wanted = Recipe(output=str(tmp_path / "run"), compression=CompressionOptions(store_folder=str(disk)))
        with pytest.raises(OptionsError, match=r"compression\.store_folder must name a folder that can be written"):
            check_folders(wanted)
        with pytest.raises(OptionsError, match=r"^output must name") as caught:
            check_folders(replace(wanted, output=str(disk / "run")))
        assert len(caught.value.mistakes) == 2
        saving = CheckpointOptions(every="2 steps", folder=str(disk / "checkpoints"))
        with pytest.raises(OptionsError, match=r"^checkpoint\.folder must name a folder that can be written"):
            check_folders(Recipe(output=str(tmp_path / "run"), checkpoint=saving))


@needs_root
def test_a_disk_that_is_full_at_a_save_keeps_the_set_before(tmp_path, capsys, monkeypatch):
    """The last save ended in a traceback, and two of four stages' new files stayed beside the others' old ones."""
    saving = [*TINY["gpt2-tiny"], *SHORT, "--save_every", "1"]
    assert cli.main(["simulate", "gpt2-tiny", *saving, "--output", str(tmp_path / "free")]) == 0
    taken = sum(path.stat().st_size for path in (tmp_path / "free/weights").rglob("*.safetensors"))
    capsys.readouterr()
    monkeypatch.setattr(Room, "check", lambda room: None)  # which would have told before
    with mounted(tmp_path / "disk", f"size={int(1.7 * taken) // 1024}k") as disk:
        assert cli.main(["simulate", "gpt2-tiny", *saving, "--output", str(disk), "--wait_for_space", "0"]) == 1
        said = capsys.readouterr().err
        assert "the weights of stage" in said and "cannot be saved in" in said and "Traceback" not in said
        assert said.endswith("free some space; the weights before these are still there, for all stages\n")
        assert newest(disk).step == 1
        assert sorted(path.name for path in (disk / "weights").iterdir()) == ["step-00000001", MARK]
        assert not list(disk.rglob("*part"))
        assert all(json.loads(line) for line in (disk / "metrics.jsonl").read_text().splitlines())

    with mounted(tmp_path / "small", f"size={taken // 2048}k") as disk:
        assert cli.main(["simulate", "gpt2-tiny", *saving, "--output", str(disk), "--wait_for_space", "0"]) == 1
        assert capsys.readouterr().err.endswith("free some space\n"), "no weights were before these"


@needs_root
def test_a_run_without_room_for_its_weights_is_told_before_it_trains(tmp_path, capsys):
    with mounted(tmp_path / "disk", "size=64k") as disk:
        options = [*TINY["gpt2-tiny"], *SHORT, "--checkpoint.every", "1 steps", "--output", str(disk)]
        assert cli.main(["simulate", "gpt2-tiny", *options]) == 1
        said = capsys.readouterr().err
        assert f"the weights and checkpoints of 1 process in {disk}/weights, {disk}/checkpoints will take" in said
        assert "name an --output on a larger disk (of a study, a --folder)" in said and "checkpoint.keep" in said
        assert not (disk / "metrics.jsonl").exists()


@needs_root
def test_weights_that_do_not_fit_at_the_end_wait_for_a_folder_on_another_disk(tmp_path, capsys, monkeypatch):
    """They were lost with the process. A user types what the run says, and the run ends as any other."""
    options = [*TINY["gpt2-tiny"], *SHORT]
    monkeypatch.setattr(room, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(Room, "check", lambda room: None)
    typed = []

    def user(seconds):
        said = capsys.readouterr().err
        if not typed:
            typed.append(next(line.strip() for line in said.splitlines() if line.startswith("  mv ")))
            subprocess.run(typed[0].replace("/OTHER/DISK", str(tmp_path)), shell=True, check=True)

    monkeypatch.setattr(room, "time", SimpleNamespace(sleep=user))
    with mounted(tmp_path / "disk", "size=300k") as disk:
        assert cli.main(["simulate", "gpt2-tiny", *options, "--output", str(disk)]) == 0
        assert typed and (disk / "weights").resolve() == tmp_path / "weights"
        assert cli.main(["export", str(disk), "--to", str(tmp_path / "model")]) == 0
        assert not json.loads((disk / "summary.json").read_text())["running"]


def results_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_does_not_replace_another_unless_it_is_told_to(folder, capsys):
    """The second run once replaced the first without a word."""
    run = folder / "run"
    options = ["--output", str(run)]
    assert cli.main(["simulate", "tiny.yaml", *options]) == 0
    first = results_of(run)
    capsys.readouterr()
    for command in ("train", "simulate"):
        assert cli.main([command, "tiny.yaml", *options]) == 2
        said = capsys.readouterr().err
        assert all(way in said for way in ("--overwrite", "--output", f"--resume {run}")), said
        assert said.startswith(f"output must name a folder without a run, but {run} holds one") and said[-1] == "\n"
    assert results_of(run) == first
    assert cli.main(["simulate", "tiny.yaml", *options, "--training.seed", "7", "--overwrite"]) == 0
    assert results_of(run) != first
    assert cli.main(["simulate", str(run / "recipe.yaml")]) == 2, "a recipe does not say once and for all"


def test_a_run_that_failed_before_its_first_step_is_replaced(tmp_path):
    mark(tmp_path, "")
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "recipe.yaml").touch()
    assert replacing(Recipe(output=str(tmp_path))) is None
