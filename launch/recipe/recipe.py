"""A recipe: all settings of a run, as one tree of dataclasses. It comes from a packaged name or file, and from options.

The dataclasses give the options, their help and the checks of types. Mistakes of several parts are gathered here and
raised together, before any process group starts.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from thinwire.compress.stores.marks import stray
from thinwire.errors.names import did_you_mean
from thinwire.launch.recipe.fields import (
    Values,
    explained,
    is_group,
    meant,
    names_of,
    put,
    read_fields,
    steps_to,
    words,
)
from thinwire.launch.recipe.yaml_text import descriptions, dump_yaml, fields_in, packaged_names, read_named
from thinwire.launch.shared.arguments import Parser, at_home
from thinwire.launch.shared.progress import showing
from thinwire.models.data.options import DataOptions
from thinwire.models.options import FRESH, ModelOptions
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
    split_pair,
    together,
)
from thinwire.pipeline.options.compression import FAST, FEW_STAGES, MILD, OF_PRETRAINED, OF_PRETRAINED_IN_MANY
from thinwire.pipeline.options.durations import read_duration

PACKAGED = files("thinwire.launch") / "recipes"

_NAME = re.compile(r"[^/\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")

SMOKE_STEPS = 3


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
    logging: list[str] = field(default_factory=list)
    """Where the curves go too: tensorboard, wandb, trackio, mlflow, or module:function, which gets a dict of numbers by
    name, with the step, after each step and evaluation."""
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
        mistakes += together.mistakes(
            self.model,
            self.clients,
            self.pipeline,
            self.replicas,
            self.compression,
            self.wire,
            self.optimizer,
            self.training,
        )
        if mistakes:
            raise OptionsError(mistakes)

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step, of all replicas."""
        return self.replicas.count * self.pipeline.batch_size

    @property
    def numbers_of_a_parameter(self) -> int:
        """Numbers that training keeps for each parameter, of its dtype: itself, its gradient, its moments."""
        optimizer, training = self.optimizer, self.training
        if not (training.steps if training.epochs is None else training.epochs):
            return 1
        has_moments = optimizer.name != "sgd" or bool(optimizer.momentum)
        return 2 + (optimizer.copies - 1) * has_moments

    @property
    def num_processes(self) -> int:
        """Processes of all replicas."""
        return self.replicas.count * self.pipeline.num_processes

    @property
    def num_boundaries(self) -> int:
        """Cuts between stages."""
        return self.pipeline.num_stages - 1

    @property
    def compared_codecs(self) -> tuple[str, ...]:
        """Codecs whose speed is compared if the user names none; few bits would break a pretrained model."""
        return FAST if self.model.weights == FRESH else MILD

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.output or f"runs/{self.name}")

    @property
    def again(self) -> Recipe:
        """The same for a run that is started again: one that was to begin anew goes on from what it has saved."""
        if self.checkpoint.resume != "never":
            return self
        return replace(self, checkpoint=replace(self.checkpoint, resume="auto"))

    @property
    def smoke(self) -> Recipe:
        """The same as a smoke run: three steps that try every part, before somebody spends hours on the whole run.

        Model, cut, batch, codecs and optimizer stay; a smoke run stays as it is. A warm-up takes the first step. The
        run has its own folders, because it replaces the smoke run before it. Clients with data of their own share those
        at hand, because no outline describes a part of the data.
        """
        compression, one = self.compression, self.clients.count == 1
        warmup = "1 step" if read_duration(compression.warmup)[0] else compression.warmup
        return replace(
            self,
            name=_marked(self.name),
            output=self.output and _marked(self.output.rstrip("/")),
            save_every=0,
            data=_little(self),
            clients=ClientOptions() if one else replace(self.clients, turn="1 step", outlines=[]),
            compression=replace(compression, warmup=warmup),
            training=replace(self.training, steps=SMOKE_STEPS, epochs=None, evaluate_every="0 steps"),
            checkpoint=replace(self.checkpoint, every=f"{SMOKE_STEPS} steps", folder="", resume="never"),
        )


def _marked(name: str) -> str:
    return name if name.endswith("-smoke") else f"{name}-smoke"


def _little(recipe: Recipe) -> DataOptions:
    """As much of the data as three different batches and one evaluation need."""
    data, one_pass = recipe.data, recipe.pipeline.pass_size
    shared = data.held_out if data.evaluation is None else 0.0
    training = max(SMOKE_STEPS, recipe.clients.count) * recipe.batch_size / (1 - shared)
    # one sample more than the held-out share, because shares are rounded
    held_out = (one_pass + 1) / shared if shared else one_pass
    samples = math.ceil(max(training, held_out)) + 1
    tokens = data.block_size if data.task == "causal-lm" else 1
    wanted = samples * tokens + 1
    return replace(data, limit=wanted if data.limit is None else min(wanted, data.limit))


def packaged() -> dict[str, str]:
    """The packaged recipes: name -> purpose."""
    return descriptions(PACKAGED)


def make_parser(prog: str, group: type[Any] = Recipe, prefix: str = "") -> Parser:
    """A parser that knows and explains an option for every field of a recipe, under its dotted name."""
    parser = Parser(
        prog=prog,
        usage=f"{prog} RECIPE [--option value ...]",
        description="RECIPE is a packaged name (see `thinwire recipes`) or the path of a YAML file. Every option below "
        "overrides one field of it; dashes and underscores are the same in option names. --codec A/G is short for "
        "--compression.activations A --compression.gradients G, and one codec stands for both. "
        "--resume RUN takes the recipe of a run that stopped, and goes on from its newest checkpoint. "
        "--overwrite is short for --checkpoint.resume never: it renames the folder of an earlier run to FOLDER.1. "
        "--max-restarts N is short for --checkpoint.restarts N. "
        "--smoke is short for --debug.smoke true: a run of three steps that tries every part.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="packaged name or path of a YAML file")
    titles: dict[str, Any] = {}
    for title, name, kind, default, said in explained(group, prefix):
        if title not in titles:
            titles[title] = parser.add_argument_group(title)
        sentence = f"{said} ({words(kind)}, default: {default})".replace("%", "%%")
        titles[title].add_argument(f"--{name}", metavar="VALUE", help=sentence)
    return parser


def parse(
    argv: Sequence[str], prog: str = "thinwire train", before: Callable[[Recipe], None] = lambda unchecked: None
) -> Recipe:
    """Parse a command line into a recipe. `before` sees it before its checks, which import torch.

    Raises:
        OptionsError: the recipe is not found, an option is unknown or has a value of the wrong type, or parts do not
            fit together. One error names as many mistakes as possible.
        SystemExit: --help was given.
    """
    named, options = read_options(argv, prog)
    values = _load(named)
    for name, text in options:
        if name in ("replicas.count", "clients.count") and text == "1":
            values[name.partition(".")[0]] = {}  # of one replica, or one client, a recipe says nothing else
        elif name == "training.steps":
            put(values, Recipe, "training.epochs", None)
        put(values, Recipe, name, text)
    values = _at_home(values)
    unchecked = read_fields(Recipe, values, checked=False)
    before(unchecked)
    if unchecked.model.weights != FRESH:
        usual = OF_PRETRAINED if unchecked.pipeline.num_stages <= FEW_STAGES else OF_PRETRAINED_IN_MANY
        values["compression"] = {**usual, **(values.get("compression") or {})}
    # the checks need torch
    with showing("importing torch") if "torch" not in sys.modules else nullcontext():
        wanted: Recipe = read_fields(Recipe, values)
    return wanted.smoke if wanted.debug.smoke else wanted


def check_place(place: str, options: Sequence[str], prog: str) -> None:
    """Check that a place may be the folder of a run, a checkpoint or an export, or that it names a recipe.

    Raises:
        OptionsError: it is neither, or `options` do not fit the recipe.
    """
    folder = Path(place)
    files = (folder / "recipe.yaml", folder / "manifest.json", *folder.glob("step-*/manifest.json"))
    if any(path.is_file() for path in files):
        return
    known = packaged_names(PACKAGED)
    if place not in known and not folder.is_file():
        raise OptionsError(
            "RUN|RECIPE must be the folder of a run, a checkpoint or an export, a packaged recipe, or the path of a "
            f"YAML file, got {place!r}{did_you_mean(place, known)}; thinwire recipes lists the packaged ones"
        )
    parse([place, *options], prog)


def _at_home(value: Any) -> Any:
    """A value of an option, or several; a path that begins with ~/ begins with the user's home."""
    if isinstance(value, list):
        return [_at_home(each) for each in value]
    if isinstance(value, dict):
        return {name: _at_home(each) for name, each in value.items()}
    return at_home(value) if isinstance(value, str) else value


def dump(recipe: Recipe) -> str:
    """A recipe as YAML, for a file that `parse` can read. What one optimizer usually has is not told to another one."""
    values, own = asdict(recipe), recipe.optimizer
    values["optimizer"] |= {name: None for name, usual in own.usual().items() if getattr(own, name) == usual}
    return dump_yaml(values)


def _load(named: str) -> Values:
    """The fields of a recipe, by its packaged name or its path. The default name of a run is the name of the file."""
    path = Path(named)
    loaded = fields_in(read_named(named, PACKAGED, "RECIPE must be a packaged name"), named, "recipe")
    read_fields(Recipe, loaded, named, checked=False)
    return {"name": path.stem, **loaded}


def read_options(argv: Sequence[str], prog: str) -> tuple[str, list[tuple[str, str]]]:
    """RECIPE, and the fields that options set, in their order: dotted names with texts."""
    found: list[tuple[str, str]] = []
    free: list[str] = []
    resumed, wrong = "", list[str]()
    rest = iter(argv)
    for argument in rest:
        if "\0" in argument:
            raise OptionsError(f"arguments must not hold the character NUL, got {argument!r}")
        option, equals, text = argument.partition("=")
        name = option[2:].replace("-", "_")
        by_number = get_args(steps_to(Recipe, name[:-5])[-1][1])[1:] if name.endswith(".help") else ()
        if argument in ("-h", "--help") or any(map(is_group, by_number)):
            parser = make_parser(prog, by_number[0], name[:-4]) if by_number else make_parser(prog)
            parser.print_help()
            raise SystemExit(0)
        if not option.startswith("--"):
            free.append(at_home(argument))
        elif argument in _FLAGS:
            found.append(_FLAGS[argument])
        elif option in _FLAGS:
            wrong.append(f"{option} takes no value, got {text!r}")
        elif option not in ("--codec", "--max-restarts", "--resume") and steps_to(Recipe, name)[-1][1] is None:
            wrong.append(_unknown(option, name))
        else:
            text = text if equals else next(rest, "--")
            if option == "--codec" and (not text or text.startswith("--")):
                raise OptionsError("--codec must be followed by codecs such as q(4)/q(8)")
            if (text.startswith("--") and not equals) or (option == "--resume" and not text):
                raise OptionsError(f"argument {option}: expected one argument; see {prog} --help")
            if option == "--codec":
                channels = [f"compression.{channel}" for channel in CHANNELS]
                found += zip(channels, split_pair(text), strict=True)
            elif option == "--resume":
                resumed = text = at_home(text)
                found += [("output", text), ("checkpoint.resume", "always")]
            elif is_group(kind := steps_to(Recipe, name)[-1][1]) and not text.startswith("{"):
                first = next(names_of(kind))
                wrong.append(f"{option} must be followed by a dot and a field, such as {option}.{first}, got {text!r}")
            else:
                found.append(("checkpoint.restarts" if option == "--max-restarts" else name, text))
    if wrong:
        raise OptionsError(f"{'; '.join(wrong)}; see {prog} --help")
    if resumed and _FLAGS["--overwrite"] in found:
        raise OptionsError(
            f"--resume {resumed} goes on from a checkpoint, and --overwrite starts from step 0; leave one of them out"
        )
    if resumed and free:
        raise OptionsError(
            f"RECIPE must be left out beside --resume {resumed}, which takes the run's recipe; see {prog} --help"
        )
    if not free and not resumed:
        raise OptionsError(f"the following arguments are required: recipe; see {prog} --help")
    if len(free) > 1:
        raise OptionsError(f"unrecognized arguments: {' '.join(free[1:])}; see {prog} --help")
    return _recipe_of(resumed) if resumed else free[0], found


_FLAGS = {"--smoke": ("debug.smoke", "true"), "--overwrite": ("checkpoint.resume", "never")}


def _unknown(option: str, name: str) -> str:
    """A sentence about an option that no field has."""
    above = name.rpartition(".")[0]
    if above and (kind := steps_to(Recipe, above)[-1][1]) is not None and not is_group(kind):
        return f"there is no field {name}: {above} must be {words(kind)}, and has no fields"
    return f"there is no option {option}{meant(option[2:], tuple(names_of(Recipe)))}"


def _recipe_of(run: str) -> str:
    """The recipe of a run that --resume names."""
    recipe = Path(run, "recipe.yaml")
    if (said := stray(recipe)) is not None:
        raise OptionsError(f"--resume must name the folder of a run, got {run!r}: {said}")
    if not recipe.is_file():
        raise OptionsError(f"--resume must name the folder of a run, got {run!r}: {recipe} is missing")
    return str(recipe)
