"""An export as a repository of the hub: its model card, and `thinwire export --push` to a stand-in of the hub's API."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import constants

from support.recipe_runs import export, simulate
from support.run_files import summary
from thinwire.launch import cli
from thinwire.launch.folder.exports import _metadata, readme
from thinwire.launch.folder.saved_run import read_run
from thinwire.launch.recipe.recipe import Recipe
from thinwire.models import hub
from thinwire.models.data.options import DataOptions
from thinwire.models.options import LoraOptions, ModelOptions

pytestmark = pytest.mark.slow

RECIPE = """
model: {name: llama, config: {vocab_size: 256, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2,
  intermediate_size: 24, max_position_embeddings: 32}}
data: {name: text, block_size: 16, held_out: 0.2}
pipeline: {num_stages: 2, num_microbatches: 2, microbatch_size: 2}
compression: {activations: q(4), gradients: q(8)}
training: {steps: 3}
"""
REPO = "lab/tuned"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = tmp_path_factory.mktemp("pushed")
    (made / "tiny.yaml").write_text(RECIPE.replace("name: text", f"name: {made / 'text'}"))
    (made / "text").write_bytes(b"some words, many times; " * 83)
    return simulate(str(made / "tiny.yaml"), made / "run")


class StandIn(BaseHTTPRequestHandler):
    """The hub's API as far as an upload calls it: it knows one repository, and keeps what is committed."""

    def answer(self, value, status=200, **headers):
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, said in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, said)
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    def do_HEAD(self):
        self.answer({})

    def do_GET(self):
        if self.path.startswith(f"/api/models/{REPO}"):
            self.answer({"id": REPO, "private": True, "siblings": [], "tags": [], "sha": "0" * 40})
        else:
            self.answer({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif self.path.endswith("/commit/main") and self.server.breaks:
            self.answer({"error": "out of order"}, 403)
        elif self.path.endswith("/commit/main"):
            assert self.headers["Authorization"] == "Bearer hf_test"
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.server.kept |= {file["path"]: base64.b64decode(file["content"]) for file in files}
            self.answer({"success": True, "commitUrl": f"{self.server.address}/{REPO}/commit/1", "commitOid": "1"})
        else:
            self.answer({"errors": [], "warnings": []})  # on the model card

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    made = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    made.kept, made.breaks, made.address = {}, False, f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", made.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    hub.unreachable.cache_clear()
    yield made
    hub.unreachable.cache_clear()
    made.shutdown()
    made.server_close()


def test_an_export_goes_to_its_repository(run, tmp_path, server, capsys):
    out = tmp_path / "out"
    assert cli.main(["export", str(run), "--to", str(out), "--push", REPO]) == 0
    assert server.kept == {str(path.relative_to(out)): path.read_bytes() for path in out.iterdir()}
    assert f"the hub has this folder, too: {server.address}/{REPO}" in capsys.readouterr().out


def test_each_mistake_is_one_sentence_before_the_work(run, tmp_path, server, monkeypatch, capsys):
    def said(name=REPO):
        hub.unreachable.cache_clear()
        assert cli.main(["export", str(run), "--to", str(tmp_path / "out"), "--push", name]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err.splitlines()[-1]

    assert "--push must name a repository as OWNER/NAME, got a/b/c" in said("a/b/c")
    assert "your token may see, got lab/other; make it with hf repos create lab/other --private" in said("lab/other")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "--push needs the hub, and http://127.0.0.1:9 cannot be reached" in said()
    monkeypatch.delenv("HF_TOKEN")
    assert "--push needs a token of the hub that may write: run hf auth login, or set HF_TOKEN" in said()


def test_an_upload_that_fails_keeps_the_export(run, tmp_path, server, capsys):
    server.breaks, out = True, tmp_path / "out"
    assert cli.main(["export", str(run), "--to", str(out), "--push", REPO]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{out} is written, but could not be pushed to {REPO}: " in said
    assert said.endswith(f"; try again with hf upload {REPO} {out}") and (out / "model.safetensors").is_file()


def card(text):
    """What the hub reads of a model card, and the rest."""
    _, front, rest = text.split("---\n", 2)
    return yaml.safe_load(front), rest


def test_the_model_card_has_data_codecs_bits_and_scores(run, tmp_path):
    front, rest = card((export(run, tmp_path / "out") / "README.md").read_text())
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["thinwire"]}
    told = summary(run)
    for row in told["channels"]:
        assert f"| 0 | {row['channel']} | `{row['codec']}` | {row['bits_per_element']:.2f} |" in rest
    assert len(told["channels"]) == 2 and f"| compression off | {told['held_out']['off']['loss']:.4f} |" in rest
    assert f"Data: `{run.parent / 'text'}`, read as text; 12 samples, each counted as often as it was seen." in rest
    (run / "summary.json").rename(tmp_path / "summary.json")
    assert "| 0 | activations | `q(4)` | not known |" in readme(read_run(run, "thinwire export"))
    (tmp_path / "summary.json").rename(run / "summary.json")


def test_the_card_of_an_adapter_names_its_base_and_its_data(tmp_path, monkeypatch):
    """As the hub links them."""
    monkeypatch.chdir(tmp_path)
    options = {"name": "lab/base", "weights": "pretrained", "lora": {"rank": 2}}
    assert front_of(options, {"name": "lab/chats", "mixture": {"other/texts": 0.1, "here.txt": 0.1}}) == {
        "base_model": "lab/base",
        "datasets": ["lab/chats", "other/texts"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["thinwire", "lora"],
    }
    (tmp_path / "lab" / "base").mkdir(parents=True)  # a folder of this machine
    assert "base_model" not in front_of(options, {"name": "lab/chats"})
    assert (
        front_of({"name": "smollm2", "weights": "pretrained"}, {})["base_model"]
        == "HuggingFaceTB/SmolLM2-135M-Instruct"
    )


def front_of(model, data):
    """The front matter of a run with these fields."""
    lora = {"lora": LoraOptions(**model["lora"])} if "lora" in model else {}
    recipe = Recipe(model=ModelOptions(**model | lora), data=DataOptions(kind="text", **data))
    return yaml.safe_load(_metadata(SimpleNamespace(recipe=recipe), True))
