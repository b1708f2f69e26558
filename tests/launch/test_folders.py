"""The folder of a run: held by one run at a time, renamed, full, moved or hostile."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.hostile import lead_out, misspell, sign, snapshot
from support.recipe_runs import SHORT, TINY
from support.small_disk import mounted
from support.tiny_run import ran, write_recipe
from thinwire.compress.stores.marks import claim
from thinwire.errors import ThinwireError
from thinwire.errors.files import MARK
from thinwire.launch import cli
from thinwire.launch.folder import policy
from thinwire.launch.folder.model_files import save_model_files
from thinwire.launch.folder.policy import (
    check_folders,
    held,
    mark,
    refusal,
    refuse_early,
    replacing,
    set_aside,
    what_is_left,
)
from thinwire.launch.folder.saved_run import read_run
from thinwire.launch.folder.weights import newest, remove_leftovers
from thinwire.launch.recipe import recipe
from thinwire.launch.recipe.fields import read_fields
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.results.figures import read_summary
from thinwire.launch.results.outputs import OutputError
from thinwire.launch.run.parts.room import Room
from thinwire.launch.run.run import Run
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
    monkeypatch.setattr(policy, "_PATIENCE", 0.2)


def test_a_folder_is_waited_for_that_the_stages_of_a_killed_launcher_still_hold(tmp_path, monkeypatch):
    """The same command at once was refused now and then: stages notice the end of their launcher after a while."""
    descriptor, turns = scratch.lock(tmp_path), []

    def wait(seconds):
        turns.append(seconds)
        if len(turns) == 5:
            os.close(descriptor)

    monkeypatch.setattr(policy, "_PATIENCE", 60)
    # of this module alone: other threads sleep too
    monkeypatch.setattr(policy, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
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
    monkeypatch.setattr(policy, "time", clock)
    with held(tmp_path), pytest.raises(BlockingIOError):
        scratch.lock(tmp_path, alone=False)


def test_files_beside_those_of_a_run_stay(folder, tmp_path):
    """A run removed every *.part, weights/step-N and replica-N, and took any metrics-N.jsonl for its own."""
    options = ["--output", ".", "--save_every", "1", "--checkpoint.every", "1 steps"]
    names = ("film.part", "weights/film.part", "replica-1/x", "step-12/x", "base/img", "metrics-2024.jsonl", "stores/x")
    names += ("checkpoints/step-12/img", "checkpoints/film.part")
    assert cli.main(["simulate", "tiny.yaml", *options]) == 0
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    for more, code in ((["--training.steps", "3"], 0), (["--overwrite"], 2)):
        assert cli.main(["simulate", "tiny.yaml", *options, *more]) == code
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
    facts = {"tied": {}, "dtype": "float32", "trained": None, "inside": "", "checkpoint": None}
    facts |= {"ends": tuple, "more_ends": ()}
    blueprint = SimpleNamespace(**facts, save_config=killed)
    prepared = SimpleNamespace(
        blueprint=blueprint,
        data=SimpleNamespace(num_labels=None, classes=None),
        recipe=SimpleNamespace(data=SimpleNamespace(tokenizer="bytes")),
    )
    with pytest.raises(KeyboardInterrupt):
        save_model_files(tmp_path, prepared)
    assert policy.foreign(Recipe(output=str(tmp_path))) == []


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
        assert f"but runs/{folder.name} holds one; --overwrite renames it" in capsys.readouterr().err


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
        assert cli.main(["simulate", "gpt2-tiny", *saving, "--output", str(disk)]) == 1
        said = capsys.readouterr().err
        assert "the weights of stage" in said and "cannot be saved in" in said and "Traceback" not in said
        assert said.endswith("free some space; the weights before these are still there, for all stages\n")
        assert newest(disk).step == 1
        assert sorted(path.name for path in (disk / "weights").iterdir()) == ["step-00000001", MARK]
        assert not list(disk.rglob("*part"))
        assert all(json.loads(line) for line in (disk / "metrics.jsonl").read_text().splitlines())

    with mounted(tmp_path / "small", f"size={taken // 2048}k") as disk:
        assert cli.main(["simulate", "gpt2-tiny", *saving, "--output", str(disk)]) == 1
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


def test_a_run_that_failed_before_its_first_step_is_replaced(tmp_path):
    mark(tmp_path, "")
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "recipe.yaml").touch()
    assert replacing(Recipe(output=str(tmp_path))) is None


@pytest.mark.parametrize("options", [[], ["--checkpoint.every", "1 steps"]])
@pytest.mark.parametrize("command", ["simulate", pytest.param("train", marks=pytest.mark.processes)])
def test_overwrite_renames_the_run_before_and_both_can_be_used(folder, capsys, command, options):
    options = ["--output", "run", *options]
    assert cli.main(["simulate", "tiny.yaml", *options]) == 0
    first = snapshot(folder / "run")
    capsys.readouterr()
    for seed in ("1", "2"):
        assert cli.main([command, "run/recipe.yaml", *options, "--training.seed", seed, "--overwrite"]) == 0
        assert f"the run before this one is in run.{seed}\n" in capsys.readouterr().err
    assert snapshot(folder / "run.1") == first
    digests = [weights_of(folder / name) for name in ("run", "run.1", "run.2")]
    assert len({*digests}) == 3
    assert sorted(path.name for path in folder.glob("run*")) == ["run", "run.1", "run.2"]
    assert cli.main([command, "run/recipe.yaml", *options, "--training.steps", "3"]) == (0 if options[2:] else 2)
    assert cli.main(["export", "run.1", "--to", "exported"]) == 0


def weights_of(run):
    return json.loads((run / "summary.json").read_text())["weights_digest"]


def test_the_current_folder_is_not_renamed(folder, monkeypatch, capsys):
    assert cli.main(["simulate", "tiny.yaml", "--output", "run"]) == 0
    monkeypatch.chdir(folder / "run")
    capsys.readouterr()
    assert cli.main(["simulate", "../tiny.yaml", "--data.name", "../text", "--output", ".", "--overwrite"]) == 2
    assert capsys.readouterr().err == f"--overwrite renames ., but it is around {folder}/run; {policy._WAY_OUT}\n"


@needs_root
def test_a_folder_where_a_disk_is_mounted_is_not_renamed(folder, capsys):
    with mounted(folder / "run", "size=10m"):
        assert cli.main(["simulate", "tiny.yaml", "--output", "run"]) == 0
        capsys.readouterr()
        assert cli.main(["simulate", "tiny.yaml", "--output", "run", "--overwrite"]) == 2
        assert capsys.readouterr().err.endswith(
            "--overwrite renames run to run.1, which is not possible: Device or resource busy; move it away, or name "
            "another --output\n"
        )


def test_of_several_processes_the_first_renames(tmp_path, monkeypatch):
    wanted = recipe.parse(["quickstart", "--output", str(tmp_path / "run"), "--overwrite"])
    mark(wanted.folder, "1")
    (wanted.folder / "summary.json").write_text("{}")
    rename = Path.rename

    def late(path, target):
        monkeypatch.setattr(Path, "rename", rename)
        set_aside(wanted)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    set_aside(wanted)
    set_aside(wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["run.1"]


@pytest.mark.parametrize("disturb", [shutil.rmtree, lambda run: run.rename("moved"), lambda run: replaced(run)])
def test_a_run_whose_folder_is_gone_stops_at_the_next_save(folder, monkeypatch, disturb):
    """It went on in a new folder without a recipe, or in that of another run."""
    assert cli.main(["simulate", "tiny.yaml", "--output", "other"]) == 0
    real, before = Run._after_step, snapshot(folder / "other")

    def after_step(run, record):
        if record.step == 0:
            disturb(Path("run"))
        real(run, record)

    monkeypatch.setattr(Run, "_after_step", after_step)
    with pytest.raises(OutputError) as caught:
        ran("--output", "run")
    assert str(caught.value) == (
        "run must stay in its place while a run writes to it, and was moved or removed; move it back, and go on with "
        "--resume"
    )
    assert snapshot(next(path for path in (folder / "run", folder / "other") if path.exists())) == before


def replaced(run):
    run.rename("moved")
    Path("other").rename(run)


@needs_root
def test_a_disk_that_is_full_stops_a_run_at_once_and_its_checkpoint_stays(folder, monkeypatch, capsys):
    """It waited for an hour, with its metrics and weights in memory."""
    monkeypatch.setattr(Room, "check", lambda room: None)  # which would have told before
    real = Run._after_step
    with mounted(folder / "disk", "size=4m") as disk:

        def after_step(run, record):
            if record.step == 3:
                run.checkpoints.saver.wait()
                with suppress(OSError), (disk / "film").open("wb") as file:
                    while True:
                        file.write(bytes(1 << 12))
                        file.flush()
            real(run, record)

        monkeypatch.setattr(Run, "_after_step", after_step)
        options = ["--training.steps", "9", "--output", str(disk / "run"), "--checkpoint.every", "2 steps"]
        assert cli.main(["simulate", "tiny.yaml", *options]) == 1
        # a line of metrics may fit into the last page of its file, and then the checkpoint does not
        assert capsys.readouterr().err.endswith(
            (
                f"{disk}/run must have room for the files of the run, but its disk does not: No space left on device; "
                f"free some space, or name another --output; what was saved before is still there\n",
                f"checkpoint 4 could not be written to {disk}/run/checkpoints: No space left on device; fix this, then "
                f"resume: earlier checkpoints are complete\n",
            )
        )
        monkeypatch.setattr(Run, "_after_step", real)
        (disk / "film").unlink()
        assert cli.main(["simulate", "--resume", str(disk / "run")]) == 0
        assert "goes on from the checkpoint of step 2" in capsys.readouterr().out
        assert cli.main(["simulate", "tiny.yaml", *options[:2], "--output", "whole"]) == 0
        assert weights_of(disk / "run") == weights_of(folder / "whole")


COMMANDS = {
    "resume": lambda run: ["simulate", "--resume", run, "--training.steps", "3"],
    "overwrite": lambda run: ["simulate", f"{run}/recipe.yaml", "--output", run, "--overwrite"],
    "eval": lambda run: ["eval", run],
    "export": lambda run: ["export", run, "--to", "exported"],
    "report": lambda run: ["report", run, "--out", "page.html"],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with all that a run can have."""
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_recipe(folder)
        options = ["--checkpoint.every", "1 steps", "--training.evaluate_every", "1 steps"]
        codec = ["--codec", "ef(topk(0.25))/q(8)"]
        assert cli.main(["simulate", "tiny.yaml", "--output", "run", *options, *codec]) == 0
    return folder / "run"


@pytest.fixture
def place(whole, tmp_path, monkeypatch):
    """A copy of the run, and a folder beside it that nobody may change."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, tmp_path / "run")
    shutil.copy(whole.parent / "text", tmp_path / "text")
    outside = tmp_path / "outside"
    shutil.copytree(whole, outside / "folder")
    for suffix in ("", ".json", ".jsonl", ".png", ".yaml", ".safetensors", ".txt"):
        (outside / f"file{suffix}").write_text("{}")
    return tmp_path


@contextmanager
def in_time():
    """An error where somebody waits, as for a pipe."""

    def late(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(place, command):
    """Run a command over the run: it works or is refused in words, and what is outside stays."""
    before = snapshot(place / "outside")
    with in_time():
        assert cli.main(COMMANDS[command]("run")) in (0, 1, 2)
    assert snapshot(place / "outside") == before
    assert not (place / "outside/made").exists()


@pytest.mark.parametrize("seed", range(24))
def test_what_leads_out_of_a_run_is_refused(place, seed):
    """A linked loss.png was overwritten at its target, a pipe in place of a manifest was waited for for ever."""
    draw = random.Random(seed)
    paths = sorted(path for path in (place / "run").rglob("*"))
    lead_out(draw.choice(paths), place / "outside", draw)
    check(place, [*COMMANDS][seed % len(COMMANDS)])


@pytest.mark.parametrize("seed", range(24))
def test_odd_values_are_told_in_words(place, seed):
    """Values of another kind ended in a traceback; those of a checkpoint had the digests that its manifest names."""
    draw = random.Random(seed)
    paths = sorted(path for path in (place / "run").rglob("*.json*") if path.stat().st_size)
    path = draw.choice(paths)
    misspell(path, draw)
    if path.name == "values.json":
        sign(path.parents[1])
    check(place, [*COMMANDS][seed % len(COMMANDS)])


def test_a_model_without_end_is_not_copied_nor_is_one_written_through_a_link(place, capsys):
    """An export copied a file of a terabyte; a run replaced the model of another one that its folder linked to."""
    with (place / "run/model/config.json").open("wb") as file:
        file.truncate(1 << 40)
    check(place, "export")
    assert "model/config.json has more than 64000000 bytes; remove it" in capsys.readouterr().err
    shutil.rmtree(place / "run/model")
    (place / "run/model").symlink_to(place / "outside/folder")
    check(place, "overwrite")
    assert "model is a link, a pipe or a device, and no run makes one; move that away" in capsys.readouterr().err


def test_a_count_of_passes_that_no_header_holds_is_told_in_words(place, capsys):
    """The run ended in a traceback at its first frame."""
    for path in (place / "run/checkpoints").glob("step-*/stage-*/values.json"):
        values = json.loads(path.read_text())
        values["passes"]["train"] = 10**30
        path.write_text(json.dumps(values))
        sign(path.parents[1])
    check(place, "resume")
    assert "values.json cannot be read: passes must be counts" in capsys.readouterr().err


def looks(run):
    """What commands ask a folder before any of them imports a training, and what reads a run."""
    wanted = Recipe(output=str(run), checkpoint=CheckpointOptions(every="1 steps"))
    for resume in ("auto", "never"):
        again = replace(wanted, checkpoint=replace(wanted.checkpoint, resume=resume))
        yield from (partial(look, again) for look in (replacing, refusal, what_is_left, check_folders))
        yield partial(refuse_early, again)
    yield partial(remove_leftovers, run)
    yield partial(read_run, run, "thinwire eval")
    yield partial(read_summary, run)
    yield partial(set_aside, again)


def test_no_look_at_a_folder_waits_for_a_pipe_or_follows_a_link(whole, tmp_path, monkeypatch):
    """A pipe for the mark of weights/ was waited for where a run was killed while it saved."""
    monkeypatch.chdir(tmp_path)
    unlocked = Path(shutil.copytree(whole, "whole"))
    shutil.copytree(unlocked / "weights/step-00000002", unlocked / "weights/new-00000003")
    outside = tmp_path / "outside"
    outside.mkdir()
    for path in sorted(unlocked.rglob("*")):
        for put in (os.mkfifo, lambda place: place.symlink_to(outside, target_is_directory=True)):
            run = Path(shutil.copytree(unlocked, "run", symlinks=True))
            place = run / path.relative_to(unlocked)
            shutil.rmtree(place) if place.is_dir() else place.unlink()
            put(place)
            for look in looks(run):
                with in_time(), suppress(ThinwireError, OSError):
                    look()
            assert not list(outside.iterdir()), path
            for left in tmp_path.glob("run*"):
                shutil.rmtree(left)
