import errno
import shutil
import subprocess
import sys
import warnings
from configparser import ConfigParser
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, version
from pathlib import Path

import pytest

from support.commands import THINWIRE, TIMEOUT
from support.own_code import add_module
from thinwire.errors import ThinwireWarning
from thinwire.launch import cli
from thinwire.launch.folder.policy import mark
from thinwire.launch.recipe.recipe import packaged
from thinwire.launch.shared import progress
from thinwire.launch.shared.arguments import Parser

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command_and_its_purpose(capsys, arguments):
    assert cli.main(arguments) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: thinwire COMMAND")
    assert said.err == ""
    for name, (_, purpose) in cli.COMMANDS.items():
        assert [name, *purpose.split()] in [line.split() for line in said.out.splitlines()]


def test_arguments_of_any_command_may_begin_with_the_users_home(monkeypatch):
    """A shell leaves ~/ as it is behind = and in quotes: `--resume=~/run` was ./~/run."""
    monkeypatch.setenv("HOME", "/home/me")
    parser = Parser(prog="thinwire new")
    parser.add_argument("place")
    parser.add_argument("--new-folder", type=Path)
    options = parser.parse_args(["~/run", "--new_folder=~/a=b"])
    assert (options.place, options.new_folder) == ("/home/me/run", Path("/home/me/a=b"))
    assert parser.parse_args(["a~/b"]).place == "a~/b"


def test_output_that_nobody_reads_on_is_no_traceback():
    """`thinwire --help | head` ended in a BrokenPipeError."""
    with subprocess.Popen([*THINWIRE, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 141)


@pytest.mark.parametrize("arguments", [["--help"], ["recipes"]])
def test_a_full_disk_of_the_output_is_a_sentence(arguments):
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run([*THINWIRE, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
    told = "the output, or a file, cannot be written: No space left on device; free some space\n"
    assert (ran.returncode, ran.stderr) == (1, told)


def test_the_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr() == (f"thinwire {version('thinwire')}\n", "")


def test_the_package_runs_as_a_module(tmp_path):
    """Laid out as setup.cfg has it installed. `env` starts a new interpreter: a fork would have the package already."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = [line for line in config["options"]["package_dir"].splitlines() if "=" in line]
    folders = dict(map(str.strip, line.split("=")) for line in lines)
    assert set(folders) <= set(config["options"]["packages"].split())
    package = tmp_path / "thinwire"
    package.mkdir()
    for path in (ROOT / folders.pop("thinwire")).glob("*.py"):
        shutil.copy(path, package)
    for name, folder in folders.items():
        (package / name.removeprefix("thinwire.")).symlink_to(ROOT / folder)
    command = ["env", sys.executable, "-m", "thinwire", "--version"]
    found = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (found.returncode, found.stdout) == (0, f"thinwire {version('thinwire')}\n"), found.stderr


@pytest.mark.parametrize(
    ("command", "hint"),
    [("trian", " (did you mean train?)"), ("", ""), ("--verson", ""), ("quickstart", "")],
)
def test_an_unknown_command_is_answered_with_the_known_ones(capsys, command, hint):
    assert cli.main([command, "quickstart"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"thinwire has no command {command!r}{hint}; known: {', '.join(cli.COMMANDS)}\n"


def test_recipes_lists_the_packaged_ones(capsys):
    assert cli.main(["recipes"]) == 0
    words = capsys.readouterr().out.split()
    for name, description in packaged().items():
        assert name in words
        assert set(description.split()) <= set(words)


MISTAKES = [
    ("--training.steps -1", "training.steps must be at least 0, got -1\n"),
    (
        "--training.steps -1 --wire.timeout 0",
        "wire.timeout must be from 0.01 to 1e6 seconds, got 0.0\ntraining.steps must be at least 0, got -1\n",
    ),
    (
        "--data.name no/such/file",
        "data.name, and what evaluation and mixture name, must be 'pydoc', 'digits', a readable file or folder, a data "
        "set on the hub, or module:function for your own, got 'no/such/file': no such file or folder "
        f"in {Path.cwd()}\n",
    ),
    (
        "--model.config.vocab_size 100",
        "the model's vocab_size must be at least the tokenizer's 256, got 100; take the model's own tokenizer, or "
        "raise vocab_size in config\n",
    ),
    ("--pipeline.layers [1,2,3,4]", "stage sizes must add up to 6 layers, got [1, 2, 3, 4] = 10\n"),
    (
        "--pipeline.num-stages 7",
        "each stage must have a layer, got 7 stages for 6 layers; lower pipeline.num_stages to at most 6, or take "
        "a model with more layers\n",
    ),
    (
        "--data.limit 300",
        "the held-out text must have 129 tokens or more, got 30; raise data.limit, which is 300, or raise "
        "data.held_out, or lower data.block_size\n",
    ),
    (
        "--data.limit 1400 --data.held_out 0",
        "a batch must not hold a sample twice: a step needs 16 samples, and there are 10 to train on; raise "
        "data.limit, which is 1400, or lower pipeline.num_microbatches or microbatch_size or accumulation\n",
    ),
    (
        "--pipeline.microbatch-size 9999",
        "a batch must not hold a sample twice: a step needs 39996 samples, and there are 168 to train on; lower "
        "pipeline.num_microbatches or microbatch_size or accumulation; an evaluation pass is as large as a training "
        "pass, and must not hold a sample twice: it needs 39996 samples, and there are 18 held out; raise "
        "data.held_out, or lower pipeline.num_microbatches or microbatch_size\n",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "simulate"])
@pytest.mark.parametrize(("options", "said"), MISTAKES)
def test_what_cannot_work_has_status_2_before_anything_starts(capsys, tmp_path, command, options, said):
    (tmp_path / "text").write_bytes(b"a to z \n" * 3000)
    text = [] if "--data.name" in options else ["--data.name", str(tmp_path / "text")]
    given = ["--output", str(tmp_path / "run"), *text, *options.split()]
    assert cli.main([command, "quickstart", *given]) == 2
    assert capsys.readouterr() == ("", said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_a_recipe_is_required(capsys, command):
    assert cli.main([command]) == 2
    said = f"the following arguments are required: recipe; see thinwire {command} --help\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        *(module for name, (module, _) in cli.COMMANDS.items() if name not in ("train", "simulate")),
    ],
)
def test_every_command_names_its_options(module):
    parser = import_module(f"thinwire.launch.{module}").make_parser()
    assert parser.prog.startswith("thinwire ") and "--help" in parser.format_help()


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_help_of_a_command_names_it(capsys, command):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: thinwire {command} RECIPE" in capsys.readouterr().out


def test_an_interrupt_has_status_130(monkeypatch, capsys):
    def interrupted(command):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", interrupted)
    assert cli.main(["simulate", "quickstart"]) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"
    monkeypatch.setattr(cli, "_installed", lambda: interrupted("before the command"))
    assert cli.main(["--help"]) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"


@pytest.mark.parametrize("error", [PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError])
def test_a_file_that_the_system_refuses_is_one_sentence(monkeypatch, capsys, error):
    number = {PermissionError: errno.EACCES, NotADirectoryError: errno.ENOTDIR, IsADirectoryError: errno.EISDIR}

    def refused(arguments):
        raise error(number.get(error, errno.EEXIST), "Not so", "a/file")

    assert cli.run(refused, []) == 1
    assert capsys.readouterr().err == "a/file cannot be used: Not so\n"


def test_our_warnings_are_sentences_and_others_keep_their_line(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    cli.run(lambda arguments: 0, [])
    ours, other = (
        warnings.formatwarning("a codec is slow", category, "codec.py", 7, line="encode()")
        for category in (ThinwireWarning, UserWarning)
    )
    assert ours == "warning: a codec is slow\n"
    assert other == "codec.py:7: UserWarning: a codec is slow\n  encode()\n"


def test_an_error_of_the_system_that_no_user_causes_keeps_its_traceback():
    def failed(arguments):
        raise OSError(errno.EBADF, "Bad file descriptor", "a/file")

    with pytest.raises(OSError, match="Bad file descriptor"):
        cli.run(failed, [])


def test_the_installed_command_passes_its_status_on():
    result = subprocess.run([*THINWIRE, "fly"], capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 2
    assert result.stderr.startswith("thinwire has no command 'fly'")


@pytest.mark.parametrize("arguments", [["recipes"], ["train", "--help"], ["simulate", "--help"]])
def test_what_only_reads_options_imports_no_torch(arguments):
    """`thinwire recipes` took 4 to 11 seconds."""
    code = f"""
import sys
from thinwire.launch.cli import main
try:
    main({arguments})
finally:
    print("torch" in sys.modules, "numpy" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert result.stdout.splitlines()[-1] == "False False"


def test_help_misspelt_names_and_refused_runs_wait_for_no_large_import(tmp_path):
    """Each took 5 to 8 seconds."""
    mark(tmp_path / "held", "")
    (tmp_path / "held/summary.json").touch()
    code = """
import contextlib, io, sys
from thinwire.launch.cli import COMMANDS, main

helped = [[name, "--help"] for name in COMMANDS]
helped += [["keys", "made"]]
mistaken = [[name, "nowhere"] for name in ("predict", "study", "report", "eval")]
mistaken += [["export", "nowhere", "--to", "there"]]
for words in [*helped, *mistaken]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        status = main(words)
        assert status == (0 if words in helped else 2), (words, status)
    assert "torch" not in sys.modules, words
for name in ("train", "simulate"):  # their codecs and schedules are checked, which takes torch
    assert main([name, "quickstart", "--output", "held"]) == 2
    assert "thinwire.launch.run.assembly" not in sys.modules and "transformers" not in sys.modules
"""
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT, check=True, cwd=tmp_path)
    told = result.stderr.splitlines()
    assert len(told) == 7, result.stderr
    assert all("output must name a folder without a run, but held holds one" in line for line in told[-2:])


def test_on_a_terminal_a_run_says_what_it_prepares(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "PATIENCE", 600)  # no seconds are counted
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    where = ["--training.steps", "0", "--data.held_out", "0", "--pipeline.num_stages", "99"]
    assert cli.main(["simulate", "quickstart", *where]) == 2
    assert capsys.readouterr().out.splitlines() == ["reading the data ...", "cutting the model ..."]


OWN = """
def main(arguments):
    return len(arguments)

def takes_nothing():
    return 0

def forgets(arguments):
    pass

constant = 3
"""


@pytest.fixture
def installed(monkeypatch):
    """Install commands of other packages: (name, value, package) each."""

    def install(*commands):
        add_module(monkeypatch, "own_commands", OWN)
        entries = [_entry(*command) for command in commands]
        monkeypatch.setattr(cli, "_entries", lambda: entries)

    return install


def _entry(name, value, package):
    entry = EntryPoint(name, value, cli.COMMAND_GROUP)
    metadata = {"Name": package, "Summary": f"What {package} is for"}
    distribution = type("Package", (Distribution,), {"metadata": metadata, "read_text": None, "locate_file": None})
    return entry._for(distribution())


def test_a_command_of_another_package_is_run_and_listed(installed, capsys):
    installed(("size", "own_commands:main", "their-package"))
    assert cli.main(["size", "a", "b"]) == 2
    assert cli.main(["--help"]) == 0
    assert "  size       What their-package is for (from their-package)" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("own_commands:nothing", "cannot be loaded: AttributeError: module 'own_commands' has no attribute 'nothing'"),
        ("no_commands:main", "cannot be loaded: ModuleNotFoundError: No module named 'no_commands'"),
        ("own_commands:constant", "must be a function, got int"),
        ("own_commands:takes_nothing", "must take one argument, the list of words after size: too many positional"),
        ("own_commands:forgets", "must return its exit status, an int, and returned None; 0 says that all went well"),
    ],
)
def test_a_mistake_in_a_command_of_another_package_is_one_sentence(installed, capsys, value, said):
    installed(("size", value, "their-package"))
    assert cli.main(["size"]) in (1, 2)
    told = capsys.readouterr().err
    assert told.startswith(f"the command size of their-package, {value}, {said}")
    assert len(told.splitlines()) == 1


def test_a_command_whose_name_is_taken_is_told(installed, capsys):
    installed(
        ("recipes", "own_commands:main", "their-package"),
        ("size", "own_commands:main", "their-package"),
        ("size", "own_commands:takes_nothing", "another-package"),
    )
    left_out = "is left out; give its entry point another name"
    ours = f"thinwire recipes is the command of Thinwire, and that of their-package (own_commands:main) {left_out}"
    theirs = (
        "thinwire size is the command of their-package, and that of another-package (own_commands:takes_nothing) "
        f"{left_out}"
    )
    assert cli.main(["recipes"]) == 0
    assert capsys.readouterr().err == "", "a command of Thinwire does not look for others"
    assert cli.main(["size"]) == 0
    assert capsys.readouterr().err.splitlines() == [theirs]
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert {ours, theirs} <= set(listed)
    assert len([line for line in listed if line.startswith("  size ")]) == 1


def test_help_imports_little():
    """`thinwire --help` once took twice as long. What finds its commands is Python's, and imports inspect in 3.13."""
    slow = {"inspect", "argparse", "yaml", "torch", "numpy", "rich"}
    code = (
        "import importlib.metadata, sys; before = set(sys.modules); "
        "from thinwire.launch.cli import main; main(['--help']); "
        f"sys.exit(str({slow!r} & (set(sys.modules) - before)) if {slow!r} & (set(sys.modules) - before) else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
