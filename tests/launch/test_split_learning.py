"""Split learning: a client with the data and a server without, two commands, and the numbers of one process."""

import io
import shutil

import numpy as np
import pytest
from PIL import Image

from support.commands import THINWIRE, completed, free_port, started
from support.data_files import write_rows
from support.run_files import numbers
from thinwire.launch import cli
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.recipe import recipe
from thinwire.models.errors import ModelError

CLIENT, SERVER = 0, 1
BOTH = """
model: {name: resnet18, config: {stem: cifar, width: 4}}
data: {name: pictures, kind: images, evaluation: test}
compression: {activations: q(4), gradients: q(8)}
optimizer: {name: sgd, lr: 0.05}
training: {epochs: 1}
pipeline:
  num_microbatches: 2
  microbatch_size: 8
"""
LABELS_AT_CLIENT = f"""{BOTH}
  num_stages: 4
  layers: [layer1, layer2, layer4]
  schedule: zbv-zero-bubble
  stages_per_process: 2
"""
LABELS_AT_SERVER = f"""{BOTH}
  num_stages: 2
  layers: [layer1]
  schedule: gpipe
"""

IN_TURN = """
model: {name: resnet18, config: {stem: cifar, width: 4}}
data: {name: pictures.parquet, kind: images, evaluation: ./test.parquet, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}
clients: {count: 2, division: order}
compression: {activations: aqsgd(q(4)), gradients: q(8)}
optimizer: {name: sgd, lr: 0.05, momentum: 0.9, schedule: constant}
training: {evaluate_every: 0 steps}
checkpoint: {every: 1 step}
pipeline: {num_microbatches: 2, microbatch_size: 4, num_stages: 4, layers: [layer1, layer2, layer4],
           schedule: zbv-zero-bubble, stages_per_process: 2}
"""


def write_pictures(folder, count):
    """Images of 8 x 8 random pixels, of two classes."""
    generator = np.random.default_rng(0)
    for index in range(count):
        place = folder / str(index % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(place / f"{index}.png")


def picture_rows(count, seed):
    """Rows of a table with images of 8 x 8 random pixels, of two classes."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        buffer = io.BytesIO()
        Image.fromarray(generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(buffer, "PNG")
        rows.append({"image": {"bytes": buffer.getvalue(), "path": None}, "label": index % 2})
    return rows


def train(client, server, *arguments):
    """Run client and server, each in its folder; AssertionError unless both end well."""
    port = free_port()
    command = [*THINWIRE, "train", *arguments]
    with started(command, client, **environment(CLIENT, port)) as at_client:
        there = completed(command, server, **environment(SERVER, port))
        assert there.status == 0, there.stderr
        assert at_client.wait() == 0, at_client.stderr


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """The folders of the client, who has the pictures, and of the server, who has not."""
    client, server = tmp_path / "client", tmp_path / "server"
    server.mkdir()
    write_pictures(client / "pictures/train", 48)
    write_pictures(client / "pictures/test", 16)
    monkeypatch.chdir(client)
    return client, server


def environment(rank, port):
    """The variables of a process that is alone on its machine."""
    return {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("recipe", "labels"), [(LABELS_AT_CLIENT, []), (LABELS_AT_SERVER, ["--labels"])], ids=["client", "server"]
)
def test_the_server_never_opens_the_data(recipe, labels, machines, capsys):
    client, server = machines
    for folder in machines:
        (folder / "split.yaml").write_text(recipe)
    assert cli.main(["outline", "split.yaml", "--to", str(server / "outline.json"), *labels]) == 0
    told = f"{'their labels' if labels else 'no label'}, the names of the classes, the shape of one, and a digest"
    assert told in capsys.readouterr().out
    port = free_port()
    command = [*THINWIRE, "train", "split.yaml", "--output", "run"]
    with started(command, client, **environment(CLIENT, port)) as at_client:
        there = completed([*command, "--data.outline", "outline.json"], server, **environment(SERVER, port))
        assert there.status == 0, there.stderr
        assert at_client.wait() == 0, at_client.stderr
    # who does not show the results says that it is done: the server said nothing at all
    shown = at_client.stdout if labels else there.stdout
    assert f"{'stage 0 is' if labels else 'stages 1 and 2 are'} done; what this host keeps is in run\n" in shown
    # the server had no pictures, and wrote the weights of its own stages alone
    assert not (server / "pictures").exists()
    stages = {path.name for path in (server / "run/weights").rglob("stage-*")}
    assert stages == ({"stage-1"} if labels else {"stage-1", "stage-2"})
    # one process that has everything gets the same
    assert cli.main(["simulate", "split.yaml", "--output", "alone", "--data.outline", "x.json"]) == 0
    assert "data.outline, x.json, is not read: this process has the data\n" in capsys.readouterr().err
    assert numbers((server if labels else client) / "run") == numbers(client / "alone")


@pytest.mark.processes
def test_a_client_goes_on_where_another_one_stopped(tmp_path, monkeypatch):
    """Two clients with pictures of their own, one after the other with a server that has none.

    A simulation that has the pictures of both gets the same weights. The optimizer's momentum passes with them.
    """
    folders = {name: tmp_path / name for name in ("first", "second", "server", "both")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "split.yaml").write_text(IN_TURN)
    shared = picture_rows(16, seed=2)
    rows = [picture_rows(16, seed=seed) for seed in (0, 1)]
    write_rows(folders["both"] / "pictures.parquet", [*rows[0], *rows[1]])
    for name, own in zip(("first", "second"), rows, strict=True):
        write_rows(folders[name] / "pictures.parquet", own)
        monkeypatch.chdir(folders[name])
        write_rows(folders[name] / "test.parquet", shared)
        assert cli.main(["outline", "split.yaml", "--to", f"{tmp_path}/{name}.json"]) == 0
    write_rows(folders["both"] / "test.parquet", shared)
    outlines = ["--clients.outlines", f"[{tmp_path}/first.json, {tmp_path}/second.json]"]
    train(folders["first"], folders["server"], "split.yaml", "--output", "run", *outlines, "--training.steps", "2")
    # what the second client needs of the first: the folder of its run
    shutil.copytree(folders["first"] / "run", folders["second"] / "run")
    train(folders["second"], folders["server"], "--resume", "run", "--training.steps", "4")
    assert not list(folders["server"].rglob("*.parquet"))
    monkeypatch.chdir(folders["both"])
    assert cli.main(["simulate", "split.yaml", "--output", "run", "--training.steps", "4"]) == 0
    assert numbers(folders["second"] / "run") == numbers(folders["both"] / "run")


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_a_sentence(machines, capsys):
    client, _ = machines
    (client / "split.yaml").write_text(LABELS_AT_SERVER)
    assert cli.main(["outline", "split.yaml", "--to", "nowhere/outline.json"]) == 2
    said = "--to must name a file that can be written, got nowhere/outline.json: No such file or directory"
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_without_labels_may_not_have_the_last_stage(machines):
    client, _ = machines
    (client / "split.yaml").write_text(LABELS_AT_SERVER)
    assert cli.main(["outline", "split.yaml", "--to", "outline.json"]) == 0
    with pytest.raises(ModelError, match=r"data\.outline must have labels for the process of the last stage"):
        prepare(recipe.parse(["split.yaml", "--data.outline", "outline.json"]), stages=[1])


@pytest.mark.slow
def test_an_outline_of_images_with_other_channels_is_to_be_written_anew(machines):
    """The server was told to set data.channels to what it was."""
    client, _ = machines
    (client / "split.yaml").write_text(LABELS_AT_CLIENT)
    assert cli.main(["outline", "split.yaml", "--to", "outline.json", "--data.channels", "1"]) == 0
    with pytest.raises(ModelError, match=r"as data\.channels, 3, got \[1\] in outline\.json; write it anew"):
        prepare(recipe.parse(["split.yaml", "--data.channels", "3", "--data.outline", "outline.json"]), stages=[1])
