import ast
import inspect
import re
from dataclasses import is_dataclass, replace
from itertools import pairwise
from typing import get_type_hints

import pytest

from thinwire.launch.run.recipe import Recipe, dump, packaged, parse
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import BoundaryOptions, CompressionOptions


def mistakes_of(*argv):
    with pytest.raises(OptionsError) as caught:
        parse([str(argument) for argument in argv])
    return list(caught.value.mistakes)


def written(tmp_path, text, name="mine.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


# --- what is read -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", packaged())
def test_packaged_recipes_parse_under_their_own_name(name):
    recipe = parse([name])
    assert (recipe.name, recipe.description) == (name, packaged()[name])
    assert str(recipe.folder) == f"runs/{name}"


def test_quickstart_is_packaged_with_a_description():
    assert len(packaged()["quickstart"]) > 20


def test_options_override_fields_and_leave_the_others():
    plain = parse(["quickstart"])
    changed = parse(
        ["quickstart", "--compression.activations", 'q(2, per="row")', "--compression.boundaries.1.gradients", "q(6)"]
    )
    assert changed == replace(
        plain,
        compression=CompressionOptions(
            activations='q(2, per="row")', gradients="q(8)", boundaries={1: BoundaryOptions(gradients="q(6)")}
        ),
    )
    codecs = [str(changed.compression.method(boundary, "gradients")) for boundary in range(3)]
    assert codecs == ["q(8)", "q(6)", "q(8)"]
    assert str(changed.compression.method(1, "activations")) == str(changed.compression.method(0, "activations"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "activations", "gradients"),
    [
        (["--codec", "auto"], "auto", "auto"),
        (["--codec=auto/q(8)"], "auto", "q(8)"),
        (["--codec", "topk(0.3) / reuse"], "topk(0.3)", "reuse"),
        (["--codec", "q(2)", "--compression.gradients", "none"], "q(2)", "none"),
    ],
)
def test_codec_is_short_for_both_channels(options, activations, gradients):
    compression = parse(["quickstart", *options]).compression
    assert (compression.activations, compression.gradients) == (activations, gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["--trace", "quickstart"], 5),
        (["quickstart", "--trace=2"], 2),
        (["quickstart", "--trace", "--debug.trace", "3"], 3),
    ],
)
def test_trace_is_short_for_a_few_steps(arguments, steps):
    assert parse(arguments).debug.trace == steps


def test_auto_and_its_candidates_are_read_back(tmp_path):
    recipe = parse(["quickstart", "--codec", "auto", "--compression.candidates", '["none", "q(2, per=\'row\')"]'])
    assert recipe.compression.candidates == ["none", "q(2, per='row')"]
    assert parse([str(written(tmp_path, dump(recipe)))]) == recipe


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--save-every", "3", "--pipeline.num-stages", "2"],
        ["--save_every", "3", "--pipeline.num_stages", "2"],
        ["--save-every=3", "--pipeline.num-stages=2"],
    ],
)
def test_dashes_and_underscores_are_the_same_in_names(options):
    recipe = parse(["quickstart", *options])
    assert (recipe.save_every, recipe.pipeline.num_stages) == (3, 2)


@pytest.mark.slow
def test_dashes_in_values_stay():
    assert parse(["quickstart", "--name=low-rank", "--output", "out-put/a__b"]).name == "low-rank"
    assert str(parse(["quickstart", "--output", "out-put/a__b"]).folder) == "out-put/a__b"


@pytest.mark.slow
@pytest.mark.parametrize("place", range(3))
def test_the_recipe_may_stand_anywhere_among_the_options(tmp_path, place):
    """Behind an option it was taken for granted, never read: the run trained on defaults, under the name "unnamed"."""
    arguments = ["--save-every=5", "--training.seed=7"]
    arguments.insert(place, str(written(tmp_path, "training: {steps: 3}")))
    recipe = parse(arguments)
    assert (recipe.name, recipe.save_every) == ("mine", 5)
    assert (recipe.training.steps, recipe.training.seed) == (3, 7)


def test_a_file_sets_fields_and_names_its_run(tmp_path):
    path = written(
        tmp_path, "model: {name: llama}\ncompression: {boundaries: {0: {activations: fp16}}}\n", "small.yaml"
    )
    defaults = Recipe(name="small")
    assert parse([str(path)]) == replace(
        defaults,
        model=replace(defaults.model, name="llama"),
        compression=CompressionOptions(boundaries={0: BoundaryOptions(activations="fp16")}),
    )


def test_a_name_in_the_file_or_on_the_command_line_wins(tmp_path):
    path = written(tmp_path, "name: given")
    assert parse([str(path)]).name == "given"
    assert parse([str(path), "--name", "given later"]).name == "given later"


def test_an_option_changes_one_channel_of_the_files_boundaries(tmp_path):
    path = written(tmp_path, "compression: {boundaries: {1: {activations: q(2)}, 2: {activations: q(3)}}}")
    boundaries = parse([str(path), "--compression.boundaries.1.gradients", "q(6)"]).compression.boundaries
    assert boundaries == {
        1: BoundaryOptions(activations="q(2)", gradients="q(6)"),
        2: BoundaryOptions(activations="q(3)"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--compression.boundaries.1.gradients", 'q(6, scale="minmax")', "--pipeline.layers", "[1,2,2,1]"],
        ["--optimizer.betas", "[0.8, 0.95]", "--optimizer.max_grad_norm", "null", "--optimizer.eps", "1e-30"],
        ["--name", "3", "--description", "null: [#'\"", "--wire.checksum", "false", "--wire.nonfinite", "send"],
    ],
)
def test_a_dumped_recipe_reads_back_equal(tmp_path, options):
    recipe = parse(["quickstart", *options])
    assert parse([str(written(tmp_path, dump(recipe)))]) == recipe


# --- what is refused ----------------------------------------------------------------------------------------------


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
        (
            ["quickstart", "--lr", "3"],
            "there is no option --lr (did you mean --optimizer.lr?); see thinwire train --help",
        ),
        (
            ["quickstart", "--seed=3"],
            "there is no option --seed (did you mean --training.seed?); see thinwire train --help",
        ),
        (
            ["quickstart", "--steps", "3", "--stages", "2"],
            "there is no option --steps (did you mean --training.steps?); there is no option --stages (did you "
            "mean --pipeline.num_stages or --pipeline.stages_per_process?); see thinwire train --help",
        ),
        (["quickstart", "--zzz"], "there is no option --zzz; see thinwire train --help"),
        (["quickstart", "extra"], "unrecognized arguments: extra; see thinwire train --help"),
        (["quickstart", "--training.steps"], "argument --training.steps: expected one argument; see thinwire train"),
        (["quickstart", "--training.steps", "many"], "training.steps must be a whole number, got many"),
        (
            ["quickstart", "--output.runs", "x"],
            "there is no field output.runs: output must be text, and has no fields",
        ),
        (["quickstart", "--training.steps", "0.5"], "training.steps must be a whole number, got 0.5"),
        (["quickstart", "--trace=few"], "debug.trace must be a whole number, got few"),
        (["quickstart", "--optimizer.lr", "fast"], "optimizer.lr must be a number, got fast"),
        (["quickstart", "--wire.checksum", "maybe"], "wire.checksum must be true or false, got maybe"),
        (["quickstart", "--training.precision", "fp8"], "training.precision must be one of fp32, bf16, got fp8"),
        (
            ["quickstart", "--optimizer.schedule", "linaer"],
            "optimizer.schedule must be one of constant, linear, cosine, got linaer (did you mean linear?)",
        ),
        (["quickstart", "--pipeline.stages-per-process", "x"], "must be a whole number or null, got x"),
        (
            ["quickstart", "--pipeline.layers", "[a]"],
            "pipeline.layers must have a name for each stage except the last, got 1 for 4 stages",
        ),
        (
            ["quickstart", "--optimizer.betas", "[5, 5]"],
            "optimizer.betas must be at least 0 and below 1, got [5.0, 5.0]",
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
        (["quickstart", "--optimizer.betas", "[1]"], "optimizer.betas must be tuple[float, float], got [1]"),
        (["quickstart", "--compression.boundaries.1.gradient", "none"], "Option 'gradient' is not accepted"),
        (["quickstart", "--compression.boundaries.x.gradients", "none"], "compression.boundaries: invalid literal"),
        (["quickstart", "--codec"], "--codec must be followed by codecs such as q(4)/q(8), or by auto"),
        (["quickstart", "--codec", "q(4)/zip"], "compression.gradients: unknown codec 'zip'"),
        (["quickstart", "--training.steps", "-1"], "training.steps must be at least 0, got -1"),
        (["quickstart", "--save-every", "-3"], "save_every must not be negative, got -3"),
        (["quickstart", "--training.evaluate_every", "9"], 'evaluate_every must be like "20 epochs" or "500 steps"'),
        (["quickstart", "--data.block_size", "0"], "data: block_size must be at least 1, got 0"),
        (["quickstart", "--model.name", ""], "model: name must be a family, a pretrained model or module:factory"),
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
        "model",
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
        ("training: [1", "is not valid YAML: while parsing a flow sequence"),
        ("- 1\n- 2", "must hold the fields of a recipe, got list"),
        ("just words", "must hold the fields of a recipe, got str"),
        ("", "must hold the fields of a recipe, got NoneType"),
        ("step: 3", "there is no field step; known: name, description, output,"),
        ("recipe: quickstart", "there is no field recipe; known: name,"),
        ("3: 3", "there is no field 3; known: name,"),
        ("training: {step: 3}", "there is no field training.step (did you mean steps?); known: "),
        ("training: 3", "training must hold fields, such as steps, got 3"),
        ("training:", "training must hold fields, such as steps, got None"),
        ("training: {steps: many}", "training.steps must be a whole number, got many"),
        (
            "compression: {boundaries: {1: {gradient: none}}}",
            "compression.boundaries: Option 'gradient' is not accepted",
        ),
    ],
)
def test_a_file_that_is_no_recipe_is_one_sentence(tmp_path, text, said):
    (mistake,) = mistakes_of(written(tmp_path, text))
    assert said in mistake
    assert "\n" not in mistake


def test_all_unknown_fields_of_a_file_are_told_at_once(tmp_path):
    mistakes = mistakes_of(written(tmp_path, "step: 3\nmodel: {layers: 3, name: gpt2}\npipeline: 3"))
    assert [re.search(r"field (\S+);|(\w+) must hold", mistake).group(1, 2) for mistake in mistakes] == [
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


# --- help ---------------------------------------------------------------------------------------------------------


def docstrings(group):
    """Field -> the string below it in the source of a dataclass."""
    body = ast.parse(inspect.getsource(group)).body[0].body
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def sentences(group, prefix=""):
    """Option -> sentence, for every field of a dataclass and of those inside it; None where there is no sentence."""
    found = {}
    for name, kind in get_type_hints(group).items():
        if is_dataclass(kind):
            found |= sentences(kind, f"{prefix}{name}.")
        else:
            found[f"--{prefix}{name}"] = docstrings(group).get(name)
    return found


def help_text(capsys, monkeypatch, *argv):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 0
    return capsys.readouterr().out


def unexplained(text, meant):
    """The options whose paragraph of the help lacks their sentence."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n  (?=--)|\n\n", text)]
    by_option = {re.split(r"[ ,]", paragraph)[0]: paragraph for paragraph in paragraphs}
    return [option for option, sentence in meant.items() if not sentence or sentence not in by_option.get(option, "")]


def test_help_has_a_sentence_for_every_field(capsys, monkeypatch):
    meant = sentences(Recipe)
    assert len(meant) > 30
    assert unexplained(help_text(capsys, monkeypatch, "--help"), meant) == []
    assert all(sentence.endswith(".") for sentence in meant.values()), meant


def test_help_of_a_boundary_has_a_sentence_for_every_field(capsys, monkeypatch):
    meant = sentences(BoundaryOptions, "compression.boundaries.")
    assert len(meant) == 2
    assert unexplained(help_text(capsys, monkeypatch, "quickstart", "--compression.boundaries.help"), meant) == []


def test_help_says_how_to_call(capsys, monkeypatch):
    text = help_text(capsys, monkeypatch, "quickstart", "--help")
    assert text.startswith("usage: thinwire train RECIPE [--option value ...]")
    assert "thinwire recipes" in text
