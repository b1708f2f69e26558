"""`thinwire generate RUN|RECIPE --prompt TEXT`: what the cut model answers, through its codecs, token by token.

All stages run in this process, as in `thinwire eval`. No data are read: only the tokenizer and the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.launch.recipe import recipe
from thinwire.launch.shared.arguments import Parser, at_least_one, not_negative, share
from thinwire.launch.shared.exit_codes import OK, working
from thinwire.launch.shared.progress import showing
from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from thinwire.launch.plan.prepared import Prepared
    from thinwire.launch.plan.prompts import Prompts
    from thinwire.launch.recipe.recipe import Recipe
    from thinwire.pipeline.generation import Generator

PROG = "thinwire generate"


def main(argv: Sequence[str]) -> int:
    """Print an answer as its tokens come, and return the exit status."""
    options, rest = make_parser().parse_known_args(argv)
    if options.top_p < 1 and not options.temperature:
        raise OptionsError(
            f"--top-p needs a --temperature above 0, without which the most likely token is taken, got {options.top_p}"
        )
    recipe.check_place(options.place, rest, PROG)  # before the long imports
    with working(), opened(options.place, rest, options.prompt, options.tokens) as (prepared, generator):
        prompts = prepared.prompts
        assert prompts is not None, "there is one"
        if not prompts.remembers:
            print("this model remembers no tokens: each new one takes a pass of all", file=sys.stderr)
        prepared.tell_notes()
        from thinwire.pipeline.generation import Sampling

        sampling = Sampling(temperature=options.temperature, top_p=options.top_p, seed=prepared.recipe.training.seed)
        tokens = generator.tokens(prompts.tokens[0], prompts.most[0], prompts.ends, "eval-on", sampling)
        for piece in _pieces(tokens, prompts):
            print(piece, end="", flush=True)
        print()
    return OK


@contextmanager
def opened(place: str, options: Sequence[str], prompt: str, tokens: int) -> Iterator[tuple[Prepared, Generator]]:
    """The model of a run, a checkpoint, an export or a recipe with these options, all its stages in this process.

    `prompt` is read, and its answer has at most so many tokens.
    """
    with showing("importing torch"):
        from thinwire.launch.folder.model_files import ends_of
        from thinwire.launch.folder.saved_run import check_base, recipe_of
        from thinwire.launch.plan.places import simulated_placement
        from thinwire.launch.plan.prepare import prepare
        from thinwire.launch.plan.training import with_prompts
        from thinwire.launch.run.assembly import assemble
        from thinwire.launch.shared.interfaces import alone
        from thinwire.models.data.load import without_texts
        from thinwire.models.data.tokenizer import make_tokenizer
    wanted = _to_answer(recipe_of(place, options, PROG), prompt, tokens)
    data = without_texts(wanted.data, make_tokenizer(wanted.data.tokenizer).vocab_size, wanted.batch_size)
    prepared = with_prompts(prepare(wanted, replace(data, ends=ends_of(Path(place)))))
    with alone():
        assembly = assemble(prepared, simulated_placement(prepared.recipe), rank=0)
        assert assembly.generator is not None, "there is a prompt"
        check_base(place, wanted.model, (stage.submod for stage in assembly.trainer.stages))
        assembly.trainer.runner.set_mode(trains=False)
        yield prepared, assembly.generator


def _to_answer(wanted: Recipe, prompt: str, tokens: int) -> Recipe:
    """The recipe without what an answer does not need."""
    from thinwire.pipeline.options import ClientOptions, DebugOptions, ReplicaOptions, TrainingOptions

    said = wanted.training
    kept = {name: getattr(said, name) for name in ("seed", "precision", "device", "threads")}
    return replace(
        wanted,
        clients=ClientOptions(),
        replicas=ReplicaOptions(),
        training=TrainingOptions(steps=0, prompts=[prompt], answer_tokens=tokens, **kept),
        debug=DebugOptions(),
    )


def _pieces(tokens: Iterable[int], prompts: Prompts) -> Iterator[str]:
    """What each token adds to the text. The first bytes of a sign wait for the others."""
    from thinwire.models.data.chats import visible

    said, shown = list[int](), ""
    for token in tokens:
        said.append(token)
        if not (text := prompts.text(said)).endswith("\N{REPLACEMENT CHARACTER}"):
            yield visible(text[len(shown) :])
            shown = text
    yield visible(prompts.text(said)[len(shown) :])


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} RUN|RECIPE --prompt TEXT [--tokens N] [--temperature T] [--top-p P] [options of the recipe]",
        description="Let a cut language model write text, with its codecs at the boundaries; --codec none: without.",
    )
    add = parser.add_argument
    add("place", metavar="RUN|RECIPE", help="the folder of a run, a checkpoint or an export; or a recipe")
    add("--prompt", required=True, metavar="TEXT", help="what to answer; for data of kind chat, the user's message")
    add("--tokens", type=at_least_one, default=128, metavar="N", help="largest number of tokens (default: %(default)s)")
    add(
        "--temperature",
        type=not_negative,
        default=0.0,
        metavar="T",
        help="draw tokens at this temperature (default: 0, the most likely token each time)",
    )
    add(
        "--top-p",
        type=share,
        default=1.0,
        metavar="P",
        help="draw among the fewest tokens whose probabilities add up to this (default: 1)",
    )
    return parser
