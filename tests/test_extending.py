"""Each section of the guide to extending is followed as it stands: its files are written, its commands are run."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from support.own_code import add_module
from support.pages import DOCS, blocks, files
from support.typed import typed
from thinwire.launch.run.parts.part import RunPart

pytestmark = pytest.mark.slow

PAGE = DOCS / "how-to" / "extending.md"
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE))


@pytest.fixture
def follow(tmp_path):
    """Write the files of a section into a folder of its own and run its commands there; what they print."""

    def followed(title):
        section = tmp_path / "section.md"
        section.write_text(SECTIONS[title])
        for name, text in files(section).items():
            (tmp_path / name).write_text(text)
        known = surroundings(tmp_path / "site")
        return "".join(typed(block, tmp_path, **known) for block in blocks(section, "sh"))

    return followed


def surroundings(site: Path):
    """Variables under which `pip install .` touches a folder of the test only, and needs no network."""
    return {
        "COLUMNS": "200",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PIP_TARGET": str(site),
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this one as its opposite
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def test_the_page_has_these_sections():
    ours = ["A transport", "A part of a run"]
    assert list(SECTIONS) == ["A codec", "A schedule", "A data source", "A kind of data", *ours, "A command"]


def test_a_part_of_a_run_has_the_methods_of_the_table():
    rows = re.findall(r"^\| (`.*?) \|", SECTIONS["A part of a run"], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {name for name in vars(RunPart) if name[0] != "_"} - {"name"}


def test_a_codec(follow):
    printed = follow("A codec")
    assert re.search(r"my_feedback\.Limited\(topk\(0\.1\), most=0\.5\)", printed), printed
    assert re.search(r"ef\(my_codecs\.Sign\).* 1\.\d\d +0 *$", printed, re.MULTILINE), printed
    assert re.search(r"my_codecs\.Sign\(scale=0\.5\).* 1\.\d\d +0 *$", printed, re.MULTILINE), printed


def test_a_schedule(follow):
    printed = follow("A schedule")
    assert "5 steps" in printed


def test_the_schedule_is_another_order():
    from thinwire.pipeline.schedules import one_forward_one_backward

    known = {}
    for code in blocks_of("A schedule"):
        exec(code, known)
    assert known["eager"].first_forwards(4, 8) == [5, 4, 3, 1]
    assert one_forward_one_backward(4, 8) == [4, 3, 2, 1]
    assert known["in_order"].mistakes(4, 2, 9) == [
        "pipeline.num_microbatches must be at most 8 for this schedule, got 9"
    ]


def test_the_order_of_ones_own_is_in_order(monkeypatch):
    from thinwire.pipeline.schedules import actions

    _, code = blocks_of("A schedule")
    add_module(monkeypatch, "my_order", code)
    order = actions("my_order:in_order", num_stages=4, num_processes=2, num_microbatches=2)
    assert [str(action) for action in order[1]] == ["1F0", "1F1", "3F0", "3F1", "3B0", "3B1", "1B0", "1B1"]


def test_a_data_source(follow):
    assert "5 steps" in follow("A data source")


def test_a_kind_of_data_with_a_loss_of_its_own(follow):
    said = follow("A kind of data")
    assert "5 steps" in said and "nan" not in said, "where nothing counts, as in what fills up a batch, nothing is lost"


def test_no_answer_sees_the_other_and_the_better_one_is_learned(monkeypatch):
    from thinwire.models.data.load import load
    from thinwire.models.data.options import DataOptions

    own = add_module(monkeypatch, "my_preferences", blocks_of("A kind of data")[0])
    given = {"name": "my_preferences:sums", "kind": "my_preferences:Preferences", "block_size": 16}
    samples = load(DataOptions(**given)).training
    ids = torch.arange(2)
    assert samples.side(ids)["position_ids"].tolist() == [[*range(8), *range(8)]] * 2
    targets, scores = samples.targets(ids), torch.zeros(2, 16, 256)
    assert bytes(targets[targets >= 0].tolist()) == b"0.7.1.7."
    assert own.preferred(scores, targets).item() == pytest.approx(8 * 0.6931, rel=1e-3)
    scores[:, :8].scatter_(2, targets[:, :8].clamp(min=0)[..., None], 50.0)
    assert own.preferred(scores, targets).item() < 0.01


def test_a_table_is_read_and_a_model_in_which_halves_see_each_other_is_refused(monkeypatch, tmp_path):
    """OPT counts positions by itself: it trained without a word."""
    from thinwire.launch.plan.prepare import prepare
    from thinwire.launch.recipe.recipe import parse
    from thinwire.models.errors import ModelError

    add_module(monkeypatch, "my_preferences", blocks_of("A kind of data")[0])
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}.", "rejected": f"{n}."} for n in range(20)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    of_table = ["--data.name", "rows.jsonl", "--data.kind", "my_preferences:Preferences", "--data.limit", "null"]
    options = ["gpt2-tiny", *of_table, "--data.block_size", "16", "--pipeline.num_microbatches", "1"]
    options += ["--data.columns", "[prompt, chosen, rejected]", "--data.held_out", "0.2"]
    targets = prepare(parse(options)).data.training.targets(torch.arange(1))
    assert bytes(targets[targets >= 0].tolist()) in {f"{n + 1}.{n}.".encode() for n in range(20)}
    opt = {"vocab_size": 256, "hidden_size": 64, "ffn_dim": 64, "num_attention_heads": 2, "word_embed_proj_dim": 64}
    with pytest.raises(ModelError, match="a sample must hold one text for opt, as with"):
        prepare(parse([*options, "--model.name", "opt", "--model.config", json.dumps(opt)]))
    with pytest.raises(ModelError, match="a question must be shorter than 4 tokens, got 4"):
        prepare(parse([*options, "--data.block_size", "8"]))


def test_a_command(follow):
    printed = follow("A command")
    assert "gpt2-tiny has 32 samples a batch" in printed
    assert re.search(r"boundary 0 activations, \S+: [\d,]+ bytes in place of [\d,]+", printed), printed
    described = "the size of a batch, and what a run sent (from my-thinwire-commands)"
    assert re.search(rf"^  size +{re.escape(described)}$", printed, re.MULTILINE), printed


def blocks_of(title):
    """The blocks of Python in a section."""
    return re.findall(r'^```python title="[^"]+"\n(.*?)^```$', SECTIONS[title], re.DOTALL | re.MULTILINE)
