"""A recipe: all settings of a run, as one tree of dataclasses. It comes from a packaged name or file, and from options.

jsonargparse makes the options, their help and the checks of types from the dataclasses. Mistakes of several parts are
gathered here and raised together, before any process group starts.
"""

from __future__ import annotations

import json
import math
import re
import sys
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from thinwire.compress.stores.marks import stray
from thinwire.errors.names import did_you_mean
from thinwire.launch.run.fields import misfits, sentence
from thinwire.launch.run.yaml_text import MOST_CHARACTERS, check_inline, load_yaml
from thinwire.launch.shared.progress import telling
from thinwire.models.data.options import DataOptions
from thinwire.models.errors import ModelError
from thinwire.models.options import ModelOptions
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS
from thinwire.pipeline.options import (
    CheckpointOptions,
    ClientOptions,
    CompressionOptions,
    DebugOptions,
    OptimizerOptions,
    PipelineOptions,
    ReplicaOptions,
    TrainingOptions,
    WireOptions,
    clients,
    computing,
    replicating,
    split_pair,
)

PACKAGED = files("thinwire.launch") / "recipes"

_NAME = re.compile(r"[^/\x00-\x1f\x7f-\x9f\u2028\u2029]+")

MOST_WAITING = 1e6
TRACED = 5
"""Steps that --trace records if it gives no number."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run."""

    name: str = "unnamed"
    """Name of the run."""
    description: str = ""
    """Purpose of the recipe, in a sentence."""
    output: str = ""
    """Folder for all files of the run; empty means runs/NAME, and runs/NAME-simulated for thinwire simulate."""
    save_every: int = 0
    """Steps between saves of the weights; 0 saves only at the end."""
    wait_for_space: float = 3600.0
    """Seconds that a run waits for space if a disk is full at a save, with its weights in memory; 0 stops at once."""
    rotate_logs: float = 64.0
    """Megabytes that metrics.jsonl, and each file of TensorBoard's curves, may have before a new one begins; 0 for no
    limit. Older lines stay in metrics-00001.jsonl and so on."""
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    clients: ClientOptions = field(default_factory=ClientOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    replicas: ReplicaOptions = field(default_factory=ReplicaOptions)
    compression: CompressionOptions = field(default_factory=CompressionOptions)
    wire: WireOptions = field(default_factory=WireOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    debug: DebugOptions = field(default_factory=DebugOptions)

    def __post_init__(self) -> None:
        mistakes = []
        if not _NAME.fullmatch(self.name) or len(self.name.encode()) > 200 or not self.name.strip(". "):
            mistakes.append(
                f"name must have at most 200 bytes, and no / or control characters, because it names a folder, got "
                f"{self.name[:60]!r}"
            )
        if not self.output.isprintable():
            mistakes.append(f"output must be a path without control characters, got {self.output[:60]!r}")
        if self.save_every < 0:
            mistakes.append(f"save_every must not be negative, got {self.save_every}")
        if not 0 <= self.wait_for_space <= MOST_WAITING:
            mistakes.append(f"wait_for_space must be from 0 to {MOST_WAITING:g} seconds, got {self.wait_for_space}")
        if not 0 <= self.rotate_logs < math.inf:
            mistakes.append(f"rotate_logs must be a number of megabytes, or 0, got {self.rotate_logs}")
        unknown = sorted(index for index in self.compression.boundaries if not 0 <= index < self.num_boundaries)
        if unknown:
            mistakes.append(
                f"compression.boundaries must lie in 0..{self.num_boundaries - 1} for "
                f"{self.pipeline.num_stages} stages, got {', '.join(map(str, unknown))}"
            )
        mistakes += replicating.misfits(self.replicas, self.compression, self.wire, self.optimizer, self.num_boundaries)
        mistakes += clients.misfits(self.clients, self.replicas)
        gradients = self.compression.possible(self.num_boundaries, "gradients")
        mistakes += computing.misfits(
            self.model, self.training, self.pipeline, self.optimizer, self.replicas, gradients
        )
        if mistakes:
            raise OptionsError(mistakes)

    def without_replicas(self, command: str) -> Recipe:
        """The same recipe; OptionsError if it has replicas, which `command` does not know."""
        if self.replicas.count == 1:
            return self
        raise OptionsError(
            f"{command} knows one pipeline only, and replicas.count is {self.replicas.count}; add --replicas.count 1"
        )

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step, of all replicas."""
        return sum(self.batch_sizes)

    @property
    def batch_sizes(self) -> list[int]:
        """Samples per optimizer step, of each replica."""
        return [self.pipeline.pass_size * passes for passes in self.replicas.passes(self.pipeline.accumulation)]

    @property
    def num_processes(self) -> int:
        """Processes of all replicas."""
        return self.replicas.count * self.pipeline.num_processes

    @property
    def group_processes(self) -> int:
        """Processes that meet in one process group: all, or those of one replica if the others may be lost."""
        return self.pipeline.num_processes if self.replicas.elastic else self.num_processes

    @property
    def num_boundaries(self) -> int:
        """Cuts between stages."""
        return self.pipeline.num_stages - 1

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.output or f"runs/{self.name}")


def packaged() -> dict[str, str]:
    """The packaged recipes: name -> purpose."""
    return {name: yaml.safe_load((PACKAGED / f"{name}.yaml").read_text())["description"] for name in packaged_names()}


def packaged_names() -> list[str]:
    """The names of the packaged recipes."""
    return sorted(entry.name.removesuffix(".yaml") for entry in PACKAGED.iterdir() if entry.name.endswith(".yaml"))


@cache
def make_parser(prog: str) -> ArgumentParser:
    """A parser with an option for every field of a recipe, under its dotted name."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} RECIPE [--option value ...]",
        description="RECIPE is a packaged name (see `thinwire recipes`) or the path of a YAML file. Every option below "
        "overrides one field of it; dashes and underscores are the same in option names. --codec A/G is short for "
        "--compression.activations A --compression.gradients G, and one codec, such as auto, stands for both. "
        f"--trace=N is short for --debug.trace N, and --trace for --debug.trace {TRACED}. "
        "--resume RUN takes the recipe of a run that stopped, and goes on from its newest checkpoint. "
        "--overwrite is short for --checkpoint.resume never: it replaces an earlier run in the folder. "
        "--max-restarts N is short for --checkpoint.restarts N. "
        "--smoke is short for --debug.smoke true: a run of three steps that tries every part.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", type=str, help="packaged name or path of a YAML file")
    # each part by its class: jsonargparse would build a default to look into, and its checks import torch
    parts = {name: kind for name, kind in get_type_hints(Recipe).items() if is_dataclass(kind)}
    parser.add_class_arguments(Recipe, None, skip=set(parts))
    for name, kind in parts.items():
        parser.add_class_arguments(kind, name)
    return parser


def parse(
    argv: Sequence[str], prog: str = "thinwire train", before: Callable[[Namespace], None] = lambda options: None
) -> Recipe:
    """Parse a command line into a recipe. `before` sees the options before their checks, which import torch.

    Raises:
        OptionsError: the recipe is not found, an option is unknown or has a value of the wrong type, or parts do not
            fit together. One error names as many mistakes as possible.
        SystemExit: --help was given.
    """
    parser = make_parser(prog)
    arguments = _one_length([_underscored(argument) for argument in _spelled_out(argv)])
    check_inline(arguments)
    try:
        named = parser.parse_args(arguments).recipe  # it may stand anywhere among the options
        base = parser.parse_object({"recipe": named, **_counted_alike(_load(named), arguments)})
        values = parser.parse_args(arguments, namespace=base)
    except ArgumentError as error:
        raise OptionsError(sentence(" ".join(str(error).split()), prog, Recipe)) from error
    except RecursionError as error:
        raise OptionsError("a value among the options is nested too deeply; write it with fewer brackets") from error
    if mistakes := misfits({name: value for name, value in values.as_dict().items() if name != "recipe"}, Recipe):
        raise OptionsError(mistakes)
    before(values)
    # the checks need torch
    with telling("importing torch") if "torch" not in sys.modules else nullcontext():
        wanted = _instantiate(parser, values)
    if not wanted.debug.smoke:
        return wanted
    from thinwire.launch.run.smoke import smoke

    return smoke(wanted)


def dump(recipe: Recipe) -> str:
    """A recipe as YAML, for a file that `parse` can read."""
    return yaml.safe_dump(json.loads(json.dumps(asdict(recipe))), sort_keys=False, allow_unicode=True)


def _instantiate(parser: ArgumentParser, values: Namespace) -> Recipe:
    """Build every part and gather the mistakes of all parts; without mistakes, build the recipe."""
    parts: dict[str, Any] = {}
    mistakes: list[str] = []
    for name in (part.name for part in fields(Recipe)):
        try:
            parts[name] = getattr(parser.instantiate(Namespace({name: values[name]})), name)
        except OptionsError as error:
            mistakes += error.mistakes
        except ModelError as error:
            mistakes += [_dotted(name, mistake) for mistake in error.mistakes]
    if mistakes:
        raise OptionsError(mistakes)
    return Recipe(**parts)


def _dotted(part: str, mistake: str) -> str:
    """A sentence about a part of a recipe; where it begins with one of its fields, by the dotted name of that."""
    first = mistake.split(maxsplit=1)[0]
    if first.startswith(f"{part}."):
        return mistake
    return f"{part}{'.' if first in get_type_hints(get_type_hints(Recipe)[part]) else ': '}{mistake}"


def _load(named: str) -> dict[str, Any]:
    """The fields of a recipe, by its packaged name or its path. The default name of a run is the name of the file."""
    known = packaged_names()
    path = Path(named)
    if named in known:
        return dict(yaml.safe_load((PACKAGED / f"{named}.yaml").read_text()))
    if not path.is_file():
        raise OptionsError(
            f"RECIPE must be a packaged name or the path of a YAML file, got {named!r}{did_you_mean(named, known)}; "
            f"known: {', '.join(known)}"
        )
    try:
        with path.open() as file:
            text = file.read(10 * MOST_CHARACTERS)  # a file has no end, or claims to be larger than any memory
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path} cannot be read: {error}") from error
    loaded = load_yaml(text, str(path))
    if not isinstance(loaded, dict):
        raise OptionsError(f"{path} must hold the fields of a recipe, got {type(loaded).__name__}")
    if mistakes := misfits(loaded, Recipe):
        raise OptionsError([f"{path}: {mistake}" for mistake in mistakes])
    return {"name": path.stem, **loaded}


def _counted_alike(loaded: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The fields of the recipe, without those that an option makes useless.

    `--training.steps` replaces the recipe's epochs; `--replicas.count 1` all that it says of replicas, and
    `--clients.count 1` all of clients.
    """
    spelled = " ".join(arguments).replace("=", " ") + " "
    loaded = {name: {} if f"--{name}.count 1 " in spelled else value for name, value in loaded.items()}
    given = {argument.partition("=")[0] for argument in arguments}
    if "--training.steps" not in given or not isinstance(loaded.get("training"), dict):
        return loaded
    return {**loaded, "training": {name: value for name, value in loaded["training"].items() if name != "epochs"}}


def _one_length(arguments: list[str]) -> list[str]:
    """The arguments, without `--training.epochs` before the last `--training.steps`: of the two, the later counts."""
    names = [argument.partition("=")[0] for argument in arguments]
    if "--training.steps" not in names:
        return arguments
    last = len(names) - 1 - names[::-1].index("--training.steps")
    dropped = {at for at, name in enumerate(names[:last]) if name == "--training.epochs"}
    dropped |= {at + 1 for at in dropped if "=" not in arguments[at]}
    return [argument for at, argument in enumerate(arguments) if at not in dropped]


SHORT_OPTIONS = ("--codec", "--trace", "--max-restarts", "--smoke", "--overwrite", "--resume")
"""Options that stand for one or more fields; `_spelled_out` replaces them."""


def _spelled_out(argv: Sequence[str]) -> list[str]:
    """The arguments, with `--codec A/G`, `--trace`, `--smoke` and others replaced by the full options."""
    arguments: list[str] = []
    rest = iter(argv)
    for argument in rest:
        option, equals, given = argument.partition("=")
        if option == "--codec":
            arguments += _both_channels(given if equals else next(rest, ""))
        elif option == "--trace":
            arguments.append(f"--debug.trace={given if equals else TRACED}")
        elif option == "--max-restarts":
            arguments += ["--checkpoint.restarts", given if equals else next(rest, "")]
        elif argument == "--smoke":
            arguments.append("--debug.smoke=true")
        elif argument == "--overwrite":
            arguments.append("--checkpoint.resume=never")
        elif option == "--resume":
            arguments += _resuming(given if equals else next(rest, ""))
        else:
            arguments.append(argument)
    return arguments


def _resuming(run: str) -> list[str]:
    """The arguments for --resume: the recipe of a run, and its folder as the output."""
    recipe = Path(run, "recipe.yaml")
    if (said := stray(recipe)) is not None:
        raise OptionsError(f"--resume must name the folder of a run, got {run!r}: {said}")
    if not recipe.is_file():
        raise OptionsError(f"--resume must name the folder of a run, got {run!r}: {recipe} is missing")
    folder = Path(run).absolute()
    if re.fullmatch(r"replica-\d+", folder.name) and (folder.parent / "recipe.yaml").is_file():
        replicas = dict(_load(str(recipe)).get("replicas") or {})
        # a replica on a host of its own has the whole run of this host, under any name
        if replicas.get("membership") == "elastic" and replicas.get("number") is None:
            raise OptionsError(f"--resume must name the folder of the whole run, {folder.parent}, got {run}")
    return [str(recipe), "--output", run, "--checkpoint.resume", "always"]


def _both_channels(pair: str) -> list[str]:
    if not pair:
        raise OptionsError("--codec must be followed by codecs such as q(4)/q(8), or by auto")
    expressions = zip(CHANNELS, split_pair(pair), strict=True)
    return [part for channel, expression in expressions for part in (f"--compression.{channel}", expression)]


def _underscored(argument: str) -> str:
    """The argument with underscores in the name of the option: --save-every=3 becomes --save_every=3."""
    option, equals, value = argument.partition("=")
    return option.replace("-", "_").replace("__", "--", 1) + equals + value if option.startswith("--") else argument
