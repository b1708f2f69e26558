"""Split learning: a client with the data and a server without, two commands, and the numbers of one process."""

import numpy as np
import pytest
from PIL import Image

from support.commands import THINWIRE, completed, free_port, started
from support.run_files import summary
from thinwire.launch import cli
from thinwire.launch.run import recipe
from thinwire.launch.run.assembly import prepare
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


def write_pictures(folder, count):
    """Images of 8 x 8 random pixels, of two classes."""
    generator = np.random.default_rng(0)
    for index in range(count):
        place = folder / str(index % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(place / f"{index}.png")


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
    assert ("their labels" if labels else "no label") in capsys.readouterr().out
    port = free_port()
    command = [*THINWIRE, "train", "split.yaml", "--output", "run"]
    with started(command, client, **environment(CLIENT, port)) as at_client:
        there = completed([*command, "--data.outline", "outline.json"], server, **environment(SERVER, port))
        assert there.status == 0, there.stderr
        assert at_client.wait() == 0, at_client.stderr
    # the server had no pictures, and wrote the weights of its own stages alone
    assert not (server / "pictures").exists()
    stages = {path.stem for path in (server / "run").rglob("stage-*.safetensors")}
    assert stages == ({"stage-1"} if labels else {"stage-1", "stage-2"})
    # one process that has everything gets the same
    assert cli.main(["simulate", "split.yaml", "--output", "alone"]) == 0
    ours, alone = summary((server if labels else client) / "run"), summary(client / "alone")
    for field in ("weights_digest", "train_loss", "held_out", "bytes_sent"):
        assert ours[field] == alone[field]


def test_a_place_that_cannot_be_written_is_a_sentence(machines, capsys):
    client, _ = machines
    (client / "split.yaml").write_text(LABELS_AT_SERVER)
    assert cli.main(["outline", "split.yaml", "--to", "nowhere/outline.json"]) == 2
    said = "--to must be a file that can be written, got nowhere/outline.json: No such file or directory"
    assert said in capsys.readouterr().err


def test_a_server_without_labels_may_not_have_the_last_stage(machines, monkeypatch):
    client, _ = machines
    (client / "split.yaml").write_text(LABELS_AT_SERVER)
    assert cli.main(["outline", "split.yaml", "--to", "outline.json"]) == 0
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ModelError, match=r"data\.outline must have labels for the process of the last stage"):
        prepare(recipe.parse(["split.yaml", "--data.outline", "outline.json"]))
