"""Completion in a shell, as a shell asks for it."""

import shutil
import subprocess
from importlib import import_module

import pytest

from thinwire.launch import cli, completion
from thinwire.launch.run import recipe
from thinwire.launch.run.fields import names_of
from thinwire.launch.run.recipe import packaged
from thinwire.pipeline.errors import OptionsError

ASK = """
source "$0"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_shtab_thinwire
printf '%s\\n' "${COMPREPLY[@]}"
"""
ANSWERS = {
    "thinwire tr": {"train", "trace"},
    "thinwire train quick": {"quickstart"},
    "thinwire train own": {"own.yaml"},
    "thinwire train quickstart --training.st": {"--training.steps"},
    "thinwire simulate --optimizer.schedule quickstart --max-r": {"--max-restarts"},
    "thinwire train quickstart --optimizer.schedule l": {"linear"},
    "thinwire predict quickstart --sched": {"--schedule"},
    "thinwire predict quickstart --schedule 1f": {"1f1b", "1f1b-wan"},
    "thinwire train quickstart --pipeline.schedule zbv": {"zbv-zero-bubble"},
    "thinwire bench resnet-": {"resnet-tiny"},
    "thinwire cluster r": {"run"},
    "thinwire cluster run --ban": {"--bandwidth"},
    "thinwire report ru": {"runs"},
    "thinwire completion z": {"zsh"},
}


def test_without_shtab_the_answer_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(completion, "find_spec", lambda name: None)
    assert cli.main(["completion", "bash"]) == 2
    assert capsys.readouterr().err.startswith("thinwire completion needs shtab; install it with pip install ")


def test_short_options_stand_for_others():
    for option in recipe.SHORT_OPTIONS:
        try:
            _, given = recipe.read_options(["quickstart", f"{option}=1"], "thinwire train")
        except OptionsError:
            continue  # its value is checked here
        assert given and all(name in names_of(recipe.Recipe) for name, _ in given)


@pytest.mark.slow
@pytest.mark.parametrize("module", [module for module, _ in cli.COMMANDS.values()])
def test_every_command_names_its_options(module):
    parser = import_module(f"thinwire.launch.{module}").make_parser()
    assert parser.prog.startswith("thinwire ") and "--help" in parser.format_help()


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The script of each shell."""
    shtab = pytest.importorskip("shtab", reason="needs shtab")
    folder, whole = tmp_path_factory.mktemp("scripts"), completion.all_commands()
    for shell in completion.SHELLS:
        (folder / shell).write_text(shtab.complete(whole, shell))
    return folder


@pytest.mark.slow
def test_bash_completes_commands_options_recipes_and_folders(scripts, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "own.yaml").touch()
    for line, wanted in ANSWERS.items():
        asked = ["bash", "-c", ASK, scripts / "bash", *line.split()]
        answer = subprocess.run(asked, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert set(answer.stdout.split()) == wanted, (line, answer.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_script_names_all_commands_and_recipes_and_is_valid(scripts, shell):
    text = (scripts / shell).read_text()
    assert all(name in text for name in (*cli.COMMANDS, *packaged(), "--max-restarts"))
    if shutil.which(shell):
        subprocess.run([shell, "-n", scripts / shell], check=True, timeout=60)
