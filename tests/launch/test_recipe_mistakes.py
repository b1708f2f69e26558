"""Recipes that are refused: each mistake is one sentence, and all of them are told at once."""

import re

import pytest

from support.recipe_files import written
from thinwire.launch.recipe.recipe import packaged, parse
from thinwire.pipeline.errors import OptionsError


def mistakes_of(*argv):
    with pytest.raises(OptionsError) as caught:
        parse([str(argument) for argument in argv])
    return list(caught.value.mistakes)


def test_an_unknown_recipe_is_answered_with_the_known_ones():
    (mistake,) = mistakes_of("quickstat")
    assert mistake == (
        "RECIPE must be a packaged name or the path of a YAML file, got 'quickstat' (did you mean "
        "quickstart?); known: " + ", ".join(packaged())
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: recipe; see thinwire train --help"),
        (
            ["quickstart", "--stesp", "3"],
            "there is no option --stesp (did you mean --training.steps?); see thinwire train --help",
        ),
        (
            ["quickstart", "--training.step", "3"],
            "there is no option --training.step (did you mean --training.steps?); see thinwire train --help",
        ),
        (["quickstart", "--optimizer.cycles", "3"], "there is no option --optimizer.cycles; see thinwire train --help"),
        (
            ["quickstart", "--lr", "3"],
            "there is no option --lr (did you mean --optimizer.lr?); see thinwire train --help",
        ),
        (["quickstart", "--wire.keys", "a\udc80"], r"because gloo encrypts nothing, got a\udc80; set"),
        (
            ["quickstart", "--data.mixture", "{yes: x, b: 1}"],
            "data.mixture must be fields with values, such as {name: 4}, got the name 1",
        ),
        (
            ["quickstart", "--learning_rate", "3"],
            "there is no option --learning_rate (did you mean --optimizer.lr?); see thinwire train --help",
        ),
        (
            ["quickstart", "--optimizer.learning_rate", "3"],
            "there is no option --optimizer.learning_rate (did you mean --optimizer.lr?); see thinwire train --help",
        ),
        (
            ["quickstart", "--logging", "wandb"],
            "logging must be a list of words, such as [a, b], got wandb; write [wandb]",
        ),
        (["quickstart", "--output=a\0b"], r"arguments must not hold the character NUL, got '--output=a\x00b'"),
        (["a\0b"], r"arguments must not hold the character NUL, got 'a\x00b'"),
        (
            ["quickstart", "--seed=3"],
            "there is no option --seed (did you mean --training.seed?); see thinwire train --help",
        ),
        (
            ["quickstart", "--steps", "3", "--stages", "2"],
            "there is no option --steps (did you mean --training.steps?); there is no option --stages (did you "
            "mean --pipeline.num_stages or --pipeline.stages_per_process?); see thinwire train --help",
        ),
        (["quickstart", "--"], "there is no option --; see thinwire train --help"),
        (["--resume", ""], "argument --resume: expected one argument; see thinwire train --help"),
        (["quickstart", "--zzz.help"], "there is no option --zzz.help; see thinwire train --help"),
        (
            ["quickstart", "--compression", "{activations: none, activations: q(4)}"],
            "; it is not valid YAML: line 1: activations must stand only once",
        ),
        (["quickstart", "--codec="], "--codec must be followed by codecs such as q(4)/q(8)"),
        (["quickstart", "--smoke=1"], "--smoke takes no value, got '1'"),
        (["quickstart", "--zzz"], "there is no option --zzz; see thinwire train --help"),
        (["quickstart", "extra"], "unrecognized arguments: extra; see thinwire train --help"),
        (["quickstart", "--training.steps"], "argument --training.steps: expected one argument; see thinwire train"),
        (["quickstart", "--training.steps", "many"], "training.steps must be a whole number, got many"),
        (
            ["quickstart", "--output.runs", "x"],
            "there is no field output.runs: output must be text, and has no fields",
        ),
        (
            ["quickstart", "--replicas", "2"],
            "--replicas must be followed by a dot and a field, such as --replicas.count, got '2'; see thinwire train",
        ),
        (
            ["quickstart", "--training.device", "gpu"],
            "training.device must be one of auto, cpu, cuda, got gpu (did you mean cuda?)",
        ),
        (["quickstart", "--training.steps", "0.5"], "training.steps must be a whole number, got 0.5"),
        (["quickstart", "--optimizer.lr", "fast"], "optimizer.lr must be a number, got fast"),
        (["quickstart", "--wire.checksum", "maybe"], "wire.checksum must be true or false, got maybe"),
        (["quickstart", "--training.precision", "fp8"], "training.precision must be one of fp32, bf16, got fp8"),
        (["quickstart", "--training.precision", "fp16"], "training.precision must be one of fp32, bf16, got fp16"),
        (
            ["quickstart", "--optimizer.schedule", "linaer"],
            "optimizer.schedule must be one of constant, linear, cosine, wsd, got linaer (did you mean linear?)",
        ),
        (["quickstart", "--pipeline.stages-per-process", "x"], "must be a whole number or null, got x"),
        (
            ["quickstart", "--pipeline.layers", "[a]"],
            "pipeline.layers must have a name for each stage except the last, got 1 for 4 stages; give as many, "
            "or add --pipeline.layers null for a cut of equal costs",
        ),
        (
            ["quickstart", "--optimizer.betas", "[5, 5]"],
            "optimizer.betas must be at least 0 and below 1, got [5.0, 5.0]",
        ),
        (
            ["quickstart", "--training.steps", "1" + "0" * 25],
            "training.steps must be at most 1000000000, got 1" + "0" * 25,
        ),
        (["quickstart", "--training.threads", "1000000000"], "training.threads must be at most 1024, got 1000000000"),
        (["quickstart", "--name", "../../x"], "name must have at most 200 bytes, and no / or control characters"),
        (["quickstart", "--name", ".."], "name must have at most 200 bytes"),
        (["quickstart", "--name", b"a\\nb\\x1b[31m".decode("unicode_escape")], r"got 'a\nb\x1b[31m'"),
        (["quickstart", "--name", "x" * 300], "name must have at most 200 bytes"),
        (["quickstart", "--output", "runs/\x1b[31m"], "output must be a path without control characters"),
        (
            ["quickstart", "--compression.activations", f"q({'-' * 10_000}4)"],
            "must have at most 500 characters, got 10004: 'q(---",
        ),
        (
            ["quickstart", "--compression.activations", "(" * 10_000],
            "must have at most 500 characters, got 10000: '(((",
        ),
        (["quickstart", "--compression.activations", "+".join(["1"] * 10_000)], "must have at most 500 characters"),
        (
            ["quickstart", "--compression.activations", f"q({'-' * 400}4)"],
            "must be a number, a quoted string or an expression",
        ),
        (["quickstart", "--model.config", "[" * 20_000], "[[[[..."),
        (["quickstart", "--name", "a\udc80"], r"because it names a folder, got 'a\udc80'"),
        (
            ["quickstart", "--optimizer.betas", "[0.9, a]"],
            "optimizer.betas must be a list of 2 numbers or null, got [0.9, a]",
        ),
        (["quickstart", "--training.steps", "010"], "training.steps must be a whole number, got 010"),
        (["quickstart", "--optimizer.betas", "[1]"], "optimizer.betas must be a list of 2 numbers or null, got [1]"),
        (
            ["quickstart", "--compression.boundaries.1.gradient", "none"],
            "there is no field compression.boundaries.1.gradient (did you mean gradients?); known: ",
        ),
        (
            ["quickstart", "--compression.boundaries", "{1: none}"],
            "compression.boundaries.1 must hold fields, such as activations, got 'none'",
        ),
        (
            ["quickstart", "--compression.boundaries", "{1: null}"],
            "compression.boundaries.1 must hold fields, such as activations, got None",
        ),
        (["quickstart", "--replicas.sync", "{every: x}"], "replicas.sync.every must be a whole number, got x"),
        (["quickstart", "--training.seed", ""], "training.seed must be a whole number, got nothing"),
        (["quickstart", "--pipeline.layers", "x"], "be a list of numbers, such as [1, 2], or a list of words, such as"),
        (
            ["quickstart", "--model.config", "{n_layer: 4"],
            "with values, such as {name: 4}, got {n_layer: 4; a } is missing",
        ),
        (
            ["quickstart", "--logging", "none"],
            "logging must be a list of words, such as [a, b], got none",
        ),
        (
            ["quickstart", "--compression.boundaries.x.gradients", "none"],
            "boundaries must be groups of fields by number, such as {1: {activations: ...}}, got the name x",
        ),
        (
            ["quickstart", f"--compression.boundaries.{'9' * 5000}.gradients", "none"],
            "boundaries must be groups of fields by number, such as {1: {activations: ...}}, got the name 999",
        ),
        (
            ["quickstart", "--model.config", "{1: 2}"],
            "model.config must be fields with values, such as {name: 4}, got the name 1",
        ),
        (["quickstart", "--codec"], "--codec must be followed by codecs such as q(4)/q(8)"),
        (["quickstart", "--codec", "q(4)/zip"], "compression.gradients: unknown codec 'zip'"),
        (["quickstart", "--training.steps", "-1"], "training.steps must be at least 0, got -1"),
        (["quickstart", "--save-every", "-3"], "save_every must not be negative, got -3"),
        (["quickstart", "--wire.connections", "4"], "wire.connections must be 1 for wire.transport gloo, got 4; zmq"),
        (["quickstart", "--wire.keys", "k"], "wire.keys needs wire.transport zmq, because gloo encrypts nothing"),
        (["quickstart", "--training.evaluate_every", "9"], 'evaluate_every must be like "20 epochs" or "500 steps"'),
        (["quickstart", "--data.block_size", "0"], "data.block_size must be at least 1, got 0"),
        (
            ["quickstart", "--model.name", ""],
            "model.name must be a type of model, a pretrained model or module:factory",
        ),
        (
            ["quickstart", "--compression.activations", "zip(4)"],
            "compression.activations: unknown codec 'zip' in 'zip(4)'; the codecs are ",
        ),
        (
            ["quickstart", "--compression.boundaries.2.gradients", "q(9)"],
            "compression.boundaries.2.gradients: q's bits must be an integer from 1 to 8, got 9",
        ),
        (
            ["quickstart", "--compression.boundaries.3.gradients", "q(6)"],
            "compression.boundaries must lie in 0..2 for 4 stages, got 3",
        ),
        (
            ["quickstart", "--pipeline.schedule", "1f1b", "--pipeline.num-microbatches", "2"],
            "pipeline.num_microbatches must be at least num_stages for this schedule, got 2 < 4; raise "
            "--pipeline.num_microbatches",
        ),
        (
            ["--resume", "run", "--overwrite"],
            "--resume run goes on from a checkpoint, and --overwrite starts from",
        ),
        (
            ["quickstart", "--pipeline.layers", "[3, 3]"],
            "pipeline.layers must have a number for each stage, got 2 for 4 stages",
        ),
    ],
)
def test_one_mistake_is_one_sentence(arguments, said):
    (mistake,) = mistakes_of(*arguments)
    assert said in mistake
    assert "\n" not in mistake and "class" not in mistake and "Parser" not in mistake


def test_mistakes_of_all_parts_are_told_at_once():
    mistakes = mistakes_of(
        *("quickstart", "--model.name", "", "--pipeline.num-stages", "0", "--pipeline.accumulation", "0"),
        *("--compression.activations", "zip", "--compression.gradients", "q(0)"),
        *("--wire.timeout", "0", "--optimizer.lr", "-1", "--training.steps", "-1"),
    )
    told = [mistake.split(" must ")[0].split(": ")[0] for mistake in mistakes]
    assert told == [
        "model.name",
        "pipeline.num_stages",
        "pipeline.accumulation",
        "compression.activations",
        "compression.gradients",
        "wire.timeout",
        "optimizer.lr",
        "training.steps",
    ], mistakes


def test_parts_that_do_not_fit_together_are_told_at_once():
    mistakes = mistakes_of(
        *("quickstart", "--save-every", "-1"),
        *("--pipeline.num-stages=2", "--compression.boundaries.1.gradients", "none"),
    )
    told = [mistake.split(" must ")[0] for mistake in mistakes]
    assert told == ["save_every", "compression.boundaries"], mistakes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training: [1", "is not valid YAML: line 1: expected ',' or ']', but got '<stream end>'"),
        ("- 1\n- 2", "must hold the fields of a recipe, got list"),
        ("just words", "must hold the fields of a recipe, got str"),
        ("", "must hold the fields of a recipe, got nothing"),
        ("step: 3", "there is no field step; known: name, description, output,"),
        ("recipe: quickstart", "there is no field recipe; known: name,"),
        ("3: 3", "there is no field 3; known: name,"),
        ("steps: 3", "there is no field steps (did you mean training.steps?); known: name,"),
        ("training: {lr: 0.1}", "there is no field training.lr (did you mean optimizer.lr?); known: training.steps,"),
        ("optimizer: {steps: 3}", "there is no field optimizer.steps (did you mean training.steps?); known: "),
        ("training: {step: 3}", "there is no field training.step (did you mean steps?); known: "),
        ("training: 3", "training must hold fields, such as steps, got 3"),
        ("training:", "training must hold fields, such as steps, got None"),
        ("training: {steps: many}", "training.steps must be a whole number, got many"),
        ('output: "a\\0b"', "line 1: text must not hold the character NUL"),
        ('checkpoint: {folder: "a\\0b"}', "line 1: text must not hold the character NUL"),
        ("optimizer: {learning_rate: 1}", "no field optimizer.learning_rate (did you mean optimizer.lr?); known: "),
        ('training: {steps: "3"}', "training.steps must be a whole number, got 3; leave out the quotes"),
        ("training: {steps: true}", "training.steps must be a whole number, got True"),
        ("training: {steps: 3.0}", "training.steps must be a whole number, got 3.0"),
        ("wire: {checksum: 1}", "wire.checksum must be true or false, got 1"),
        ("wire: {timeout: true}", "wire.timeout must be a number, got True"),
        ("name: 123", "name must be text, got 123; put it in quotes"),
        ("data: {name: yes}", "data.name must be text, got True; put it in quotes"),
        ("model: {weights: 1.5}", "model.weights must be text, got 1.5; put it in quotes"),
        ("training: {prompts: [42]}", "training.prompts.0 must be text, got 42; put it in quotes"),
        (
            "compression: {boundaries: {1: {gradient: none}}}",
            "there is no field compression.boundaries.1.gradient (did you mean gradients?)",
        ),
        (
            "compression: {boundaries: {1: 3}}",
            "compression.boundaries.1 must hold fields, such as activations, got 3",
        ),
    ],
)
def test_a_file_that_is_no_recipe_is_one_sentence(tmp_path, text, said):
    (mistake,) = mistakes_of(written(tmp_path, text))
    assert said in mistake
    assert "\n" not in mistake


def test_all_unknown_fields_of_a_file_are_told_at_once(tmp_path):
    mistakes = mistakes_of(written(tmp_path, "step: 3\nmodel: {layers: 3, name: gpt2}\npipeline: 3"))
    assert [re.search(r"field ([\w.]+)|(\w+) must hold", mistake).group(1, 2) for mistake in mistakes] == [
        ("step", None),
        ("model.layers", None),
        (None, "pipeline"),
    ]


def test_a_file_that_is_no_text_cannot_be_read(tmp_path):
    path = tmp_path / "weights.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    (mistake,) = mistakes_of(path)
    assert mistake.startswith(f"{path} cannot be read: ")


def test_a_folder_is_no_recipe(tmp_path):
    (mistake,) = mistakes_of(tmp_path)
    assert mistake.startswith("RECIPE must be a packaged name or the path of a YAML file")
