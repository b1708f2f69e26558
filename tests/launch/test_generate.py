"""Text of a cut model: that of the unsplit one, through codecs, in a command and at the evaluations of a run."""

import json
from contextlib import chdir
from dataclasses import replace

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.data_files import write_tokenizer
from support.recipe_runs import export, simulate
from support.run_files import numbers
from support.tiny_model import layers
from support.tiny_run import TEXT, alone
from thinwire.launch import cli
from thinwire.launch.plan.places import simulated_placement
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.plan.prompts import read_prompts
from thinwire.launch.plan.training import prepare_training
from thinwire.launch.recipe import recipe
from thinwire.launch.run.assembly import assemble
from thinwire.models.data.chats import visible
from thinwire.models.data.tokenizer import Bytes
from thinwire.models.layers import build_stage

SIZES = {
    "gpt2": "vocab_size: 256, n_layer: 3, n_embd: 16, n_head: 2, n_positions: 64",
    "llama": "vocab_size: 256, hidden_size: 16, num_hidden_layers: 3, num_attention_heads: 2, intermediate_size: 24",
    "qwen3": "vocab_size: 256, hidden_size: 16, num_hidden_layers: 3, num_attention_heads: 2, num_key_value_heads: 1, "
    "head_dim: 8, intermediate_size: 24",
    "gemma3_text": "vocab_size: 256, hidden_size: 16, num_hidden_layers: 3, num_attention_heads: 2, head_dim: 8, "
    "num_key_value_heads: 1, intermediate_size: 24, sliding_window: 4, layer_types: [sliding_attention, "
    "full_attention, sliding_attention], pad_token_id: null, eos_token_id: 7, bos_token_id: null",
    "mixtral": "vocab_size: 256, hidden_size: 16, num_hidden_layers: 3, num_attention_heads: 2, intermediate_size: 24, "
    "num_key_value_heads: 1, num_local_experts: 4, output_router_logits: true",
}
RECIPE = """
model: {{name: {name}, config: {{{sizes}, initializer_range: 0.4}}}}
data: {{name: text, block_size: 16, held_out: 0.08}}
pipeline: {{num_stages: 3, num_microbatches: 2, microbatch_size: 2}}
compression: {{activations: none, gradients: none}}
training: {{steps: 1}}
"""
PROMPT = "Where is it?"


def write(folder, name):
    (folder / f"{name}.yaml").write_text(RECIPE.format(name=name, sizes=SIZES[name]))
    (folder / "text").write_bytes(TEXT)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """A folder with a recipe for each model."""
    folder = tmp_path_factory.mktemp("generate")
    for name in SIZES:
        write(folder, name)
    return folder


@pytest.fixture(scope="module")
def run(recipes):
    """A run of the recipe of llama, `run`."""
    with chdir(recipes):
        return simulate("llama.yaml", recipes / "run")


@pytest.fixture
def folder(recipes, run, monkeypatch):
    monkeypatch.chdir(recipes)
    return recipes


def generated(capsys, place, *options, tokens=24):
    """What the command prints."""
    capsys.readouterr()
    assert cli.main(["generate", str(place), "--prompt", PROMPT, "--tokens", str(tokens), *options]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def answer_of(whole, tokens=24):
    """What the library's own loop makes of an unsplit model."""
    ids = torch.tensor([list(PROMPT.encode())])
    out = whole.generate(ids, do_sample=False, max_new_tokens=tokens, pad_token_id=0)[0, ids.shape[1] :].tolist()
    ends = whole.generation_config.eos_token_id
    return visible(Bytes().decode(out[: out.index(ends)] if ends in out else out))


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_cut_model_writes_what_transformers_writes_with_the_exported_one(folder, capsys, monkeypatch, name):
    run = folder / "run" if name == "llama" else simulate(f"{name}.yaml", folder / f"run-{name}")
    whole = AutoModelForCausalLM.from_pretrained(export(run, folder / f"export-{name}"))
    expected = answer_of(whole)
    assert len(set(expected)) > 3, "it is no single token again and again"
    assert generated(capsys, run) == expected

    def forgetful(*given):
        return replace(read_prompts(*given), remembers=False)

    monkeypatch.setattr("thinwire.launch.plan.training.read_prompts", forgetful)
    assert generated(capsys, run) == expected


@pytest.mark.slow
def test_an_answer_of_a_run_ends_with_the_tokens_that_end_one_of_its_first_model(folder, capsys):
    """A run saves no generation settings beside its weights: its answer went on to the last token."""
    first = export(folder / "run", folder / "first")
    ids = torch.tensor([list(PROMPT.encode())])
    whole = AutoModelForCausalLM.from_pretrained(first)
    answer = whole.generate(ids, do_sample=False, max_new_tokens=24, pad_token_id=0)[0, len(PROMPT) :].tolist()
    end = next(token for place, token in enumerate(answer) if place > 4 and token not in answer[:place])
    (first / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    given = ["--model.name", str(first), "--model.weights", "pretrained", "--model.config", "{}"]
    run = simulate("llama.yaml", folder / "ended", *given, "--training.steps", "0")
    expected = visible(Bytes().decode(answer[: answer.index(end)]))
    assert generated(capsys, "llama.yaml", *given) == generated(capsys, run) == expected
    assert generated(capsys, export(run, folder / "export-ended")) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ends"), [({}, 3), ({"eos_token_id": 5}, 5)])
def test_the_tokenizer_says_what_ends_an_answer_of_a_type_unless_the_recipe_does(folder, tmp_path, config, ends):
    """A fresh llama stopped at token 2, whatever that was; so did transformers with the exported one."""
    words = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "words", pairs=False), eos_token="[SEP]")
    words.save_pretrained(tmp_path / "words")
    (tmp_path / "text").write_text("why did it go\n" * 300)
    sizes = yaml.safe_load(f"{{{SIZES['llama']}}}")
    options = ["--data.tokenizer", str(tmp_path / "words"), "--data.name", str(tmp_path / "text")]
    options += ["--model.config", json.dumps(sizes | config), "--training.prompts", '["why"]', "--training.steps", "0"]
    assert prepare_training(recipe.parse(["llama.yaml", *options]), copies=0).prompts.ends == {3, ends}
    run = simulate("llama.yaml", tmp_path / "run", *options)
    assert json.loads((run / "model" / "config.json").read_text())["eos_token_id"] == ends


@pytest.mark.slow
def test_layers_that_remember_nothing_see_all_tokens_each_time(folder, capsys):
    (folder / "own.yaml").write_text(
        "model: {name: 'support.tiny_model:layers'}\ndata: {name: text, block_size: 16, held_out: 0.2}\n"
        "pipeline: {num_stages: 2, num_microbatches: 2, microbatch_size: 2}\n"
        "compression: {activations: none, gradients: none}\n"
    )
    prepared = prepare(recipe.parse(["own.yaml"]))
    whole = build_stage(prepared.blueprint, range(len(layers())), seed=0).eval()
    text = list(PROMPT.encode())
    with torch.no_grad():
        for _ in range(5):
            text.append(int(whole(torch.tensor([text]))[0, -1].argmax()))
    assert generated(capsys, "own.yaml", tokens=5) == visible(Bytes().decode(text[len(PROMPT) :]))
    cli.main(["generate", "own.yaml", "--prompt", PROMPT, "--tokens", "1"])
    assert "each new one takes a pass of all" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"repetition_penalty": 1.3, "no_repeat_ngram_size": 0}, "repetition_penalty"),
        ({"num_beams": 2, "suppress_tokens": [3], "top_k": 5}, "num_beams, suppress_tokens"),
        ({"repetition_penalty": 1.0, "do_sample": True, "bad_words_ids": None}, None),
    ],
)
def test_settings_by_which_transformers_writes_another_text_are_named(folder, tmp_path, capsys, settings, named):
    """The text was another one than that of the exported model, without a word."""
    model = export(folder / "run", tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(settings))
    said = f"the model's generation settings name {named}, which transformers follows and these answers do not"
    assert cli.main(["generate", str(model), "--prompt", PROMPT, "--tokens", "1"]) == 0
    told = capsys.readouterr().err
    assert said in told if named else "settings" not in told


@pytest.mark.slow
def test_an_answer_that_the_model_has_no_room_for_is_announced(folder, capsys):
    """It ended at the model's last position without a word."""
    assert cli.main(["generate", "gpt2.yaml", "--prompt", PROMPT, "--tokens", "53"]) == 0
    said = "the model has 64 positions and the longest prompt takes 12: its answer ends at 52 tokens"
    assert said in capsys.readouterr().err
    prompted = ["--training.prompts", json.dumps([PROMPT]), "--training.answer_tokens", "53", "--training.steps", "0"]
    assert cli.main(["simulate", "gpt2.yaml", *prompted, "--output", "answered"]) == 0
    assert said in capsys.readouterr().out
    assert cli.main(["generate", "gpt2.yaml", "--prompt", PROMPT, "--tokens", "52"]) == 0
    assert "positions" not in capsys.readouterr().err


@pytest.mark.slow
def test_each_token_crosses_each_boundary_once_through_the_codec(folder):
    """The prompt is one frame of 12 tokens; then each token is one of its own."""
    options = ["--training.prompts", json.dumps([PROMPT]), "--training.answer_tokens", "4", "--codec", "q(8)"]
    with alone():
        ready = prepare_training(recipe.parse(["llama.yaml", *options]), copies=0)
        assembly = assemble(ready, simulated_placement(ready.recipe), rank=0)
        assembly.trainer.runner.set_mode(trains=False)
        asked = ready.prompts
        [*found] = assembly.generator.tokens(asked.tokens[0], 4, (), "eval-on")
        [*off] = assembly.generator.tokens(asked.tokens[0], 4, (), "eval-off")
        sent = [stage.meter.sent for stage in assembly.trainer.stages]
    assert len(found) == len(off) == 4
    for stage in (0, 1):
        on, off = (sent[stage][stage, "activations", phase] for phase in ("eval-on", "eval-off"))
        assert on.frames == off.frames == 4
        assert on.uncompressed == off.uncompressed == (12 + 3) * 16 * 4
        # 64 bytes of header; a byte for each number and a scale in bf16 for each token
        assert off.bytes == 4 * 64 + on.uncompressed
        assert on.bytes < off.bytes - 2 * 15 * 16


@pytest.mark.slow
def test_a_coarse_codec_changes_the_answer_and_none_takes_it_away(folder, capsys):
    plain = generated(capsys, "run")
    assert generated(capsys, "run", "--codec", "q(2)") != plain
    assert generated(capsys, "run", "--codec", "aqsgd(q(2))/q(2)") == plain, "a first visit goes in full"


@pytest.mark.slow
def test_tokens_are_drawn_alike_from_the_same_seed(folder, capsys):
    hot = ["--temperature", "2.5"]
    drawn = generated(capsys, "run", *hot)
    assert generated(capsys, "run", *hot) == drawn != generated(capsys, "run", *hot, "--training.seed", "1")
    assert generated(capsys, "run", *hot, "--top-p", "0.000001") == generated(capsys, "run")
    assert generated(capsys, "run", *hot, "--top_p=0.000001") == generated(capsys, "run")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["deberta-tiny", "--prompt", "a"], "only a language model answers prompts, and data of kind pairs are for"),
        (["gpt2.yaml", "--prompt", "a" * 64], "a prompt must be shorter than the model's 64 positions, got 64 tokens"),
        (["gpt2.yaml", "--prompt", ""], "a prompt must have at least one token, got none"),
        (
            ["gpt2.yaml", "--prompt", "a", "--temperature", "-1"],
            "argument --temperature: must be a number of at least 0",
        ),
        (["gpt2.yaml", "--prompt", "a", "--top-p", "2"], "argument --top-p: must be above 0 and at most 1, got '2'"),
        (
            ["gpt2.yaml", "--prompt", "a", "--top-p", "0.5"],
            "--top-p needs a --temperature above 0, without which the most",
        ),
        (
            ["gpt2.yaml", "--prompt", "a", "--tokens", "0"],
            "argument --tokens: must be a whole number of at least 1, got '0'",
        ),
        (["gpt2.yaml"], "the following arguments are required: --prompt"),
        (["nowhere", "--prompt", "a"], "RUN|RECIPE must be the folder of a run"),
    ],
)
def test_mistakes_are_sentences(recipes, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(recipes)
    capsys.readouterr()
    assert cli.main(["generate", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(said)
    assert told.err.count("\n") == 1


ASKED = ["--training.prompts", '["Where is it?", "And you?"]', "--training.answer_tokens", "3", "--codec", "q(1)/q(4)"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_prompts_are_answered_at_each_evaluation_as_the_command_answers_them(folder, capsys):
    often = ["--training.steps", "2", "--training.evaluate_every", "1 step", "--data.limit", "900"]
    here = simulate("qwen3.yaml", folder / "asked", *ASKED, *often)
    quiet = simulate("qwen3.yaml", folder / "quiet", *ASKED[-2:], *often)
    found = lines(here / "answers.jsonl")
    assert [(line["step"], line["prompt"]) for line in found] == [
        (step, prompt) for step in (1, 2) for prompt in ("Where is it?", "And you?")
    ]
    assert any(line["on"] != line["off"] for line in found)
    assert visible(found[2]["on"]) == generated(capsys, here, tokens=3)
    assert visible(found[2]["off"]) == generated(capsys, here, "--codec", "none", tokens=3)
    apart = {"traffic", "bytes_sent", "answers"}  # answers are sent, too
    asked, not_asked = ({name: each[name] for name in each.keys() - apart} for each in map(numbers, (here, quiet)))
    assert asked == not_asked, "answers change nothing in training"
    assert cli.main(["report", str(here), "--out", str(folder / "page.html")]) == 0
    page = (folder / "page.html").read_text()
    assert "And you?" in page


@pytest.mark.slow
def test_prompts_of_a_recipe_are_read_before_the_run(folder, capsys):
    capsys.readouterr()
    assert cli.main(["simulate", "gpt2.yaml", "--training.prompts", json.dumps(["a" * 64])]) == 2
    assert capsys.readouterr().err.startswith("a prompt must be shorter than the model's 64 positions, got 64 tokens")
    assert cli.main(["simulate", "gpt2.yaml", *ASKED, "--training.compile", "true"]) == 2
    assert capsys.readouterr().err.startswith("training.prompts must be left out beside training.compile")
