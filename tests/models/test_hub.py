"""Names on the hub, asked of a server of the test: a hub that cannot be reached is no long wait."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from support.data_files import write_json, write_tokenizer
from support.family_cases import whole
from support.models import blueprint
from support.parts import read
from thinwire.models import hub
from thinwire.models.checkpoint import open_checkpoint
from thinwire.models.data.parts import Part
from thinwire.models.data.tokenizer import make_tokenizer
from thinwire.models.errors import ModelError
from thinwire.models.model import find_model
from thinwire.models.options import ModelOptions

pytestmark = pytest.mark.slow  # transformers and datasets are imported

READERS = {
    "model": lambda name: find_model(ModelOptions(name=name)),
    "tokenizer": make_tokenizer,
    "data": lambda name: read("text", Part(name)),
}


def hang_up(request):
    """Close the connection without an answer; the library tries again after this, as where nothing listens."""
    request.close_connection = True


def know_no_name(request):
    request.send_response(200 if request.path == "/" else 404)
    request.send_header("X-Error-Code", "RepoNotFound")
    request.send_header("Content-Length", "0")
    request.end_headers()


def be_broken(request):
    request.send_response(503)
    request.send_header("Content-Length", "0")
    request.end_headers()


@pytest.fixture
def hub_that(monkeypatch, tmp_path, hub_cache):
    """Let the hub be a server that answers in a certain way, with an empty cache; it lists what it was asked."""

    @contextmanager
    def serve(answer):
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (BaseHTTPRequestHandler,), {}))
        server.asked = []

        def answered(request):
            server.asked.append(request.path)
            answer(request)

        server.RequestHandlerClass.do_HEAD = server.RequestHandlerClass.do_GET = answered
        server.RequestHandlerClass.log_message = lambda *_: None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_cache.config, "HF_ENDPOINT", server.address)
        monkeypatch.setattr(hub_cache.config, "HF_HUB_OFFLINE", False)
        hub.unreachable.cache_clear()
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()

    yield serve
    hub.unreachable.cache_clear()


@pytest.mark.parametrize("what", READERS)
def test_a_hub_that_cannot_be_reached_is_asked_once(what, hub_that):
    """The library asked six times, with pauses, for each file that a name may have: 25 to 60 s."""
    with hub_that(hang_up) as server, pytest.raises(ModelError) as caught:
        READERS[what]("nobody/no-such-name")
    assert server.asked == ["/"]
    told = (
        f"it is no folder here, the cache of the hub does not hold all of it, and {server.address} cannot be reached ("
    )
    assert told in str(caught.value)
    assert not constants.HF_HUB_OFFLINE, "as it was"


@pytest.mark.parametrize("what", READERS)
def test_a_hub_that_does_not_know_a_name_says_so(what, hub_that):
    with hub_that(know_no_name) as server, pytest.raises(ModelError, match="nobody/no-such-name") as caught:
        READERS[what]("nobody/no-such-name")
    assert len(server.asked) > 1 and "cannot be reached" not in str(caught.value)


def test_a_hub_that_fails_is_not_asked_again(hub_that):
    with hub_that(be_broken) as server, pytest.raises(ModelError, match=r"cannot be reached \(it answers 503\)"):
        make_tokenizer("nobody/no-such-name")
    assert server.asked == ["/"]


def test_a_hub_that_is_silent_has_its_time(hub_that, monkeypatch):
    monkeypatch.setattr(hub, "PART_SECONDS", 0.2)
    waiting = threading.Event()
    with hub_that(lambda request: waiting.wait(20)), pytest.raises(ModelError, match=r"cannot be reached .*Timeout"):
        make_tokenizer("nobody/no-such-name")
    waiting.set()


def test_so_has_a_resolver_of_names(hub_that, monkeypatch):
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    waiting = threading.Event()
    monkeypatch.setattr(hub, "_ask", lambda address: waiting.wait(20))
    with hub_that(hang_up), pytest.raises(ModelError, match=r"cannot be reached \(no answer within 0.2 s\)"):
        make_tokenizer("nobody/no-such-name")
    waiting.set()


def cached(folder, name, **texts):
    """Files of a repository as the library's cache holds them; the folder that they are in."""
    known, commit = folder / "hub" / f"models--{name.replace('/', '--')}", "0" * 40
    (known / "refs").mkdir(parents=True)
    (known / "refs" / "main").write_text(commit)
    snapshot = known / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for stem, text in texts.items():
        (snapshot / stem.replace("_", ".")).write_text(text)
    return snapshot


def test_what_the_cache_holds_is_read_without_the_hub(hub_that, tmp_path):
    cached(tmp_path, "me/tiny", config_json=json.dumps({"model_type": "gpt2"}))
    with hub_that(hang_up) as server:
        find_model(ModelOptions(name="me/tiny"))
    assert server.asked == ["/"]


def test_so_are_generation_settings_though_they_are_a_link_there(hub_that, tmp_path):
    whole("gpt2").save_pretrained(tmp_path / "blobs")
    (tmp_path / "blobs" / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    snapshot = cached(tmp_path, "me/tiny")
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)
    with hub_that(hang_up):
        for name in ("me/tiny", str(snapshot)):
            model = blueprint(ModelOptions(name=name, weights="pretrained"), task="causal-lm")
            assert model.ends() == (3, 7)
    assert open_checkpoint(str(snapshot)).digest() == open_checkpoint(str(tmp_path / "blobs")).digest()


def test_so_is_a_tokenizer_without_a_tokenizer_json(hub_that, tmp_path):
    words = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ncat\n"
    cached(tmp_path, "me/words", config_json=json.dumps({"model_type": "bert"}), vocab_txt=words)
    with hub_that(hang_up):
        assert make_tokenizer("me/words").tokens(["cat"]).tolist() == [2, 5, 3]


def test_files_and_folders_ask_nobody(hub_that, tmp_path):
    """`datasets` counted on a server each file that it read."""
    rows, words = write_json(tmp_path / "rows.jsonl", [{"text": "a"}]), write_tokenizer(tmp_path / "words")
    with hub_that(hang_up) as server:
        assert read("text", Part(str(rows))) == ["a"]
        assert make_tokenizer(words).vocab_size > 1
    assert server.asked == []
