"""Where the curves of a run go too."""

import json
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from support.own_code import add_module
from support.tiny_run import prepared, ran
from thinwire.errors import ThinwireError
from thinwire.launch.recipe import recipe
from thinwire.launch.results.hooks import Hooks
from thinwire.launch.results.log_file import read_lines

pytestmark = pytest.mark.usefixtures("folder")

OWN = """
lines = []


def log(points):
    lines.append(points)


def fails(points):
    raise KeyError("no such place")


PLACE = 3
"""
ASKED = ["--training.prompts", "[why]", "--training.answer_tokens", "2"]


@pytest.mark.slow
def test_a_function_gets_the_points_of_every_step_and_evaluation(monkeypatch):
    lines = add_module(monkeypatch, "own_log", OWN).lines
    ran("--logging", "[own_log:log]")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {"train/loss", "train/lr", "share/compute", "train/tokens_per_second"} <= set(lines[0])
    assert "held-out/loss compression off" in lines[2]


@pytest.mark.slow
def test_training_goes_on_without_a_function_that_fails(monkeypatch, capsys):
    lines = add_module(monkeypatch, "own_log", OWN).lines
    ran("--logging", "[own_log:fails, own_log:log]")
    assert len(lines) == 3
    assert "logging to own_log:fails failed, and is left out from now on: KeyError: 'no such place'" in (
        " ".join(capsys.readouterr().out.split())
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_the_recipe_and_the_points(monkeypatch, name):
    """A stand-in with the functions of both packages."""
    called = []
    service = ModuleType(name)
    service.__spec__ = sys.__spec__
    for function in ("init", "log", "finish", "define_metric"):
        setattr(service, function, lambda *args, function=function, **options: called.append((function, args, options)))
    service.Table = lambda dataframe: dataframe
    monkeypatch.setitem(sys.modules, name, service)
    ran("--logging", f"[{name}]", *ASKED)
    (begun, _, options), *_, (ended, _, _) = called
    assert (begun, ended, options["name"][:4], options["config"]["training"]["steps"]) == ("init", "finish", "tiny", 2)
    logged = [
        (args[0].get("step"), options.get("step"))
        for function, args, options in called
        if function == "log" and "answers" not in args[0]
    ]
    assert logged == [(step, None) if name == "wandb" else (None, step) for step in range(3)]
    assert ("id" in options) == (name == "wandb")
    [table] = (args[0]["answers"] for _, args, _ in called if args and "answers" in args[0])
    [row] = table.to_dict("records")
    assert row == read_lines(Path("runs/tiny/answers.jsonl"))[0] and row["prompt"] == "why"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "known"), [("wandb", "id"), ("trackio", "name")])
def test_a_service_goes_on_with_a_run_that_is_resumed_and_with_no_other(monkeypatch, name, known):
    """The curves of a run that --overwrite replaced went on, and in trackio those of any run with the same name."""
    begun, service = [], ModuleType(name)
    service.__spec__ = sys.__spec__
    service.init = lambda **options: begun.append(options[known])
    service.log = service.finish = service.define_metric = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, name, service)
    for more in ([], ["--training.steps", "3"], ["--overwrite"], ["--training.steps", "3"], ["--output", "other"]):
        ran("--logging", f"[{name}]", "--checkpoint.every", "1 steps", *more)
    first, resumed, anew, anew_resumed, other = begun
    assert (first, anew) == (resumed, anew_resumed) and len({first, anew, other}) == 3


@pytest.mark.slow
def test_a_service_that_fails_at_its_end_does_not_fail_the_run(monkeypatch, capsys):
    """A run of days ended in a traceback, without its picture, and was started again."""
    service = ModuleType("wandb")
    service.__spec__ = sys.__spec__
    service.init = service.log = service.define_metric = lambda *_, **__: None
    service.finish = lambda: {}["no network"]
    monkeypatch.setitem(sys.modules, "wandb", service)
    ran("--logging", "[wandb]")
    said = "logging to wandb failed at its end, and may lack points: KeyError: 'no network'"
    assert said in " ".join(capsys.readouterr().out.split())
    assert Path("runs/tiny/loss.png").exists()


@pytest.mark.slow
def test_tensorboard_keeps_the_points_of_a_run_that_goes_on(monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ["--logging", "[tensorboard]", "--checkpoint.every", "2 steps", "--optimizer.schedule", "constant"]
    every = ["--training.evaluate_every", "2 steps"]
    ran("--training.steps", "3", *options, *every)
    later = time.time() + 2
    monkeypatch.setattr(time, "time", lambda: later)  # files are read in the order of the seconds in their names
    folder = ran("--training.steps", "5", *options, *every).recipe.folder
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    points = {point.step: point.value for point in events.Scalars("train/loss")}
    lines = read_lines(folder / "metrics.jsonl")
    assert points == {line["step"]: pytest.approx(line["loss"], rel=1e-6) for line in lines} and len(points) == 5
    assert {2, 4} <= {point.step for point in events.Scalars("held-out/loss compression off")}
    [recipe] = events.Tensors("recipe/text_summary")[-1:]
    assert (folder / "recipe.yaml").read_text() in recipe.tensor_proto.string_val[0].decode()


@pytest.mark.slow
def test_tensorboard_shows_each_step_once_wherever_a_run_goes_on(monkeypatch):
    """Its page showed steps twice: a first start must be written, or the next one is taken for it."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    wanted = recipe.parse(["tiny.yaml", "--logging", "[tensorboard]"])
    wanted.folder.mkdir(parents=True)
    starts = [(0, 5), (3, 6), (0, 4), (2, 7)]  # the third found no checkpoint
    for number, (first, last) in enumerate(starts):
        monkeypatch.setattr(time, "time", lambda number=number: 1.8e9 + number)  # names of files have the seconds
        hooks = Hooks(wanted, "id", first)
        for step in range(first + 1, last + 1):
            hooks(step, {"train/loss": float(number)})
        hooks.close()
        assert hooks.news() is None
    events = EventAccumulator(str(wanted.folder / "tensorboard")).Reload().Tensors("train/loss")
    assert [(point.step, point.tensor_proto.float_val[0]) for point in events] == [
        *((step, 2.0) for step in (1, 2)),
        *((step, 3.0) for step in (3, 4, 5, 6, 7)),
    ]


@pytest.mark.slow
def test_wandb_itself_keeps_the_points(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    ran("--logging", "[wandb]", *ASKED)
    [kept] = (file.read_bytes() for file in tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert kept.count(b"train/loss") >= 2 and b"held-out/loss compression off" in kept
    [table] = tmp_path.glob("wandb/offline-run-*/files/media/table/answers_*.table.json")
    assert json.loads(table.read_text())["columns"] == ["step", "prompt", "on", "off"]


@pytest.mark.slow
def test_trackio_itself_keeps_the_points_at_their_steps(tmp_path, monkeypatch):
    """It numbered them anew, and warned of the name."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read with the import
    storage = pytest.importorskip("trackio.sqlite_storage", reason="trackio is not installed").SQLiteStorage
    ran("--logging", "[trackio]", *ASKED)
    [name] = storage.get_runs("thinwire")
    kept = storage.get_logs("thinwire", name)
    assert [each["step"] for each in kept] == [0, 1, 2, 2]
    assert "train/loss" in kept[0] and "held-out/loss compression off" in kept[2]
    assert [each["answers"]["_value"][0]["prompt"] for each in kept if "answers" in each] == ["why"]


@pytest.mark.slow
def test_mlflow_keeps_the_points_the_answers_and_the_recipe_of_a_run_that_goes_on(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    for name, value in {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/kept", "MLFLOW_ALLOW_FILE_STORE": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for steps in (2, 3):
        ran("--logging", "[mlflow]", "--checkpoint.every", "1 steps", "--training.steps", str(steps), *ASKED)
    [run] = mlflow.search_runs(experiment_names=["thinwire"], output_format="list")
    assert run.data.params["training.steps"] == "2" and run.info.run_name == "tiny"
    kept = {
        point.step: point.value for point in mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    }
    assert (
        kept == {line["step"]: line["loss"] for line in read_lines(Path("runs/tiny/metrics.jsonl"))} and len(kept) == 3
    )
    assert "steps: 3" in mlflow.artifacts.load_text(f"{run.info.artifact_uri}/recipe.yaml")
    answers = mlflow.load_table("answers.json", run_ids=[run.info.run_id]).to_dict("records")
    assert answers[1:] == read_lines(Path("runs/tiny/answers.jsonl")) and [row["step"] for row in answers] == [2, 3]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensorbord", "logging must be tensorboard, wandb, trackio, mlflow or module:function, got 'tensorbord'"),
        ("own_log:PLACE", "logging must be a function of a dict of numbers, got int at own_log:PLACE"),
        ("own_log:nothing", "logging: module own_log has no 'nothing'"),
    ],
)
def test_what_gets_no_lines_is_refused(monkeypatch, name, said):
    add_module(monkeypatch, "own_log", OWN)
    with pytest.raises(ThinwireError, match=said):
        prepared("--logging", f"[{name}]")
