"""Training on conversations: a step of a cut model is that of the unsplit model on the whole batch."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from support.data_files import CHAT, WORDS, write_tokenizer
from support.pages import DOCS, blocks
from support.recipe_files import with_routers, write_chats
from support.recipe_runs import simulate
from support.run_files import summary
from support.tiny_run import alone
from thinwire.launch import cli
from thinwire.launch.folder.exports import export
from thinwire.launch.folder.model_files import ends_of
from thinwire.launch.folder.saved_run import read_run, recipe_of
from thinwire.launch.plan.places import simulated_placement
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.plan.training import prepare_training
from thinwire.launch.processes import launcher
from thinwire.launch.recipe import recipe
from thinwire.launch.run.run import Run
from thinwire.models.data.templates import today
from thinwire.pipeline.training.trainer import Trainer


@pytest.fixture
def chats(tmp_path, monkeypatch, hub_cache):
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path)


def trained(*options):
    """The prepared run of the recipe, its weights after it, and the uncompressed bytes of a step by channel."""
    with alone():
        ready = prepare(recipe.parse(["chat.yaml", *options]))
        run = Run(ready, simulated_placement(ready.recipe))
        run.go()
        stages = run.trainer.stages
        state = {name: t.clone() for stage in stages for name, t in stage.submod.full_state().items()}
        sent = {
            route[1]: t.uncompressed for stage in stages for route, t in stage.meter.sent.items() if "train" in route
        }
    return ready, state, sent


def unsplit_step(ready, start):
    """The weights after a step of the library's model, from all conversations one by one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**ready.recipe.model.config, tie_word_embeddings=False))
    model.load_state_dict(start)
    samples = ready.data.training
    tokens, targets = samples.tokens.long(), samples.labels.long()
    losses, count = [], 0
    for row in range(len(samples)):
        starts = [*(samples.positions[row] == 0).nonzero().flatten().tolist(), tokens.shape[1]]
        for begin, end in pairwise(starts):
            labels = torch.cat([torch.tensor([-100]), targets[row, begin : end - 1]])
            if (counted := int((labels != -100).sum())) > 0:
                losses.append(model(tokens[row, begin:end][None], labels=labels[None]).loss * counted)
                count += counted
    (sum(losses) / count).backward()
    with torch.no_grad():
        return {name: p - 0.5 * p.grad for name, p in model.named_parameters()}


@pytest.mark.slow
def test_what_ends_an_answer_in_the_data_is_named_by_the_run_and_its_export(chats, tmp_path, capsys):
    """`thinwire generate` stopped there and the exported model did not."""
    run = simulate("chat.yaml", tmp_path / "run")
    assert "answers end by token 3, which the generation settings of the model do not name" in capsys.readouterr().out
    export(read_run(run, "thinwire export"), tmp_path / "export")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "export").generation_config.eos_token_id == [3]
    assert ends_of(run) == ends_of(tmp_path / "export") == {(3,)}
    assert ends_of(tmp_path / "chat.yaml") == frozenset()
    asked = prepare_training(recipe.parse(["chat.yaml", "--training.prompts", '["why"]']), copies=0)
    assert asked.prompts.ends == {3}
    known = prepare(
        recipe.parse(["chat.yaml", "--model.config", json.dumps(asked.recipe.model.config | {"eos_token_id": 3})])
    )
    assert known.blueprint.more_ends == () and not any("answers end by" in note for note in known.data.notes)


def test_routers_spread_the_tokens_of_each_micro_batch_but_its_padding(chats):
    """A step's loss is the mean over its counted tokens of the library's losses of their micro-batches."""
    from transformers import AutoConfig, AutoModelForCausalLM

    _, start, _ = trained(*with_routers(0.5), "--training.steps", "0")
    ready, after, sent = trained(*with_routers(0.5))
    config = AutoConfig.for_model("mixtral", **ready.recipe.model.config, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(start)
    samples = ready.data.training
    losses, counts = [], []
    for rows in torch.arange(6).view(3, 2):
        labels = torch.nn.functional.pad(samples.targets(rows), (1, 0), value=-100)[:, :-1]
        mask = (torch.arange(24) < samples.lengths[rows, None]).long()
        counts.append((labels != -100).sum())
        losses.append(model(samples.inputs(rows), attention_mask=mask, labels=labels).loss * counts[-1])
    (sum(losses) / sum(counts)).backward()
    for name, parameter in model.named_parameters():
        expected = (parameter - 0.5 * parameter.grad).detach()
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-6, msg=name)
    longest = sum(samples.lengths.view(3, 2).max(1).values.tolist())
    one = longest * 2 * 16 * 4 + 3 * 2 * 4 * 8  # of each micro-batch, sums of two kinds for four experts
    assert sent == {"activations": one, "gradients": one}, "of the last boundary"


@pytest.mark.slow
def test_an_evaluation_reports_the_loss_of_the_language_alone(chats, tmp_path):
    still = ["--data.held_out", "0.4", "--pipeline.num_microbatches", "1", "--optimizer.lr", "1e-30"]
    without, weighed = (
        summary(simulate("chat.yaml", tmp_path / f"{weight}", *with_routers(weight), *still)) for weight in (0.0, 0.5)
    )
    assert weighed["held_out"] == without["held_out"]
    assert weighed["train_loss"] > without["train_loss"] + 0.9, "0.5 * 2 of 4 experts, if all get as many tokens"


PACKED = ("--data.packing", "true", "--data.block_size", "32", "--pipeline.num_microbatches", "2")
SINGLE = ("--pipeline.num_microbatches", "6", "--pipeline.microbatch_size", "1")


@pytest.mark.slow
@pytest.mark.parametrize(("packing", "options"), [(False, ()), (True, PACKED), (False, SINGLE)])
def test_a_step_is_that_of_conversations_one_by_one(chats, packing, options):
    """Micro-batches differ in what counts; with packing, conversations of one sample do not see each other."""
    _, start, _ = trained(*options, "--training.steps", "0")
    ready, after, _ = trained(*options)
    samples = ready.data.training
    counts = (samples.targets(torch.arange(len(samples))) != -100).sum(1).tolist()
    assert len(set(counts)) > 1
    assert (max(map(len, samples.rows)) > 1) == packing
    expected = unsplit_step(ready, start)
    assert expected.keys() == after.keys()
    for name, tensor in expected.items():
        assert torch.allclose(after[name], tensor, rtol=0, atol=1e-6), name


@pytest.mark.slow
def test_padding_behind_the_longest_of_a_micro_batch_does_not_cross(chats, monkeypatch):
    """Nothing depends on it, so weights are the same to the last bit. Buffers of feedback hold whole samples."""
    ready, after, sent = trained()
    number = 4 * 16 * 2  # bytes of a token in both rows
    longest = sum(ready.data.training.lengths.view(3, 2).max(1).values.tolist())
    assert longest < 3 * 24
    assert sent == {"activations": longest * number, "gradients": longest * number}
    _, _, with_buffers = trained("--codec", "aqsgd(q(4))/q(8)")
    assert with_buffers == {"activations": 3 * 24 * number, "gradients": longest * number}
    _, _, reused = trained("--codec", "topk(0.5)/reuse")
    assert reused == {"activations": 3 * 24 * number, "gradients": 3 * 24 * number}
    monkeypatch.setattr(Trainer, "lengths", lambda *_: None)
    _, whole, sent = trained()
    assert sent == {"activations": 3 * 24 * number, "gradients": 3 * 24 * number}
    assert all(torch.equal(whole[name], tensor) for name, tensor in after.items())


@pytest.mark.slow
def test_the_line_that_serves_an_export_answers_a_message(chats, tmp_path):
    assert cli.main(["export", str(simulate("chat.yaml", tmp_path / "run")), "--to", "tuned"]) == 0
    (page,) = blocks(DOCS / "start" / "serve.md", "python")
    exec(page, said := {})
    assert said["answer"]["role"] == "assistant" and said["answer"]["content"]


@pytest.mark.slow
def test_a_run_keeps_the_date_of_its_chats(chats, tmp_path, monkeypatch, capsys):
    """It could not go on the next day, and an evaluation a week later scored other tokens without a word."""
    dated = "{{ 'cat ' if strftime_now('%d') == '29' else 'dog ' }}" + CHAT
    write_tokenizer(tmp_path / "words", pairs=False, chat=dated)
    more = ["--data.held_out", "0.4", "--pipeline.num_microbatches", "1", "--checkpoint.every", "1 step"]
    monkeypatch.setattr("thinwire.models.data.tokenizer.today", lambda: "2026-11-29")
    run = simulate("chat.yaml", tmp_path / "run", *more)
    assert "  date: 2026-11-29\n" in (run / "recipe.yaml").read_text()
    held_out = summary(run)["held_out"]["on"]["loss"]
    monkeypatch.setattr("thinwire.models.data.tokenizer.today", lambda: "2026-11-30")
    capsys.readouterr()
    assert cli.main(["eval", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"][0]["rows"][0][1] == held_out
    simulate("chat.yaml", run, *more, "--training.steps", "2")
    assert summary(run)["steps"] == 2
    assert cli.main(["export", str(run), "--to", "tuned"]) == 0
    assert "chats had the date 2026-11-29 in training" in Path("tuned/README.md").read_text()
    asked = prepare_training(recipe_of("tuned", ["--training.prompts", '["why"]'], "thinwire generate"), copies=0)
    assert asked.prompts.tokens[0][0] == 5 + WORDS.index("cat")
    assert prepare(recipe.parse(["chat.yaml", "--output", "new"])).recipe.data.date == "2026-11-30"


@pytest.mark.parametrize("text", ["", "data: []", "data: {date: 5}", "data: {date: now}", "data: {"])
def test_a_run_of_a_damaged_folder_has_the_date_of_today(chats, tmp_path, text):
    (tmp_path / "words" / "chat_template.jinja").write_text("{{ strftime_now('%d')[:0] }}" + CHAT)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(text)
    assert prepare(recipe.parse(["chat.yaml", "--output", "run"])).recipe.data.date == today()


def test_processes_that_are_new_interpreters_have_the_date_of_their_launcher(chats, tmp_path, monkeypatch):
    (tmp_path / "words" / "chat_template.jinja").write_text("{{ strftime_now('%d')[:0] }}" + CHAT)
    ready = prepare(recipe.parse(["chat.yaml", "--data.date", "2026-11-29"]))
    monkeypatch.setattr("thinwire.launch.processes.forks.is_safe", lambda: False)
    monkeypatch.setattr("thinwire.launch.processes.stage_processes.command", lambda line, descriptors: line)
    assert launcher._starting(ready, ["chat.yaml"], ())[-2:] == ["--data.date", "2026-11-29"]
