"""`thinwire export RUN --to DIR`: write the model of a run for the library that it came from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.launch.shared.arguments import Parser, new_folder, run_folder
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.progress import showing

PROG = "thinwire export"
DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str]) -> int:
    """Export a run, and return the exit status."""
    options = make_parser().parse_args(argv)
    place, target = run_folder(Path(options.run)), new_folder(Path(options.to))
    with showing("importing torch"):
        from thinwire.launch.folder.exports import export, merged
        from thinwire.launch.folder.push import check_repository, push
        from thinwire.launch.folder.saved_run import read_run
    if options.push is not None:
        check_repository(options.push)  # before the work
    with showing("writing the model"):
        run = read_run(place, PROG)
        run = merged(run, options.dtype) if options.merged else run
        notes = export(run, target, options.dtype, of_whole=options.whole)
    for note in notes:
        print(note)
    print(f"{len(run.weights)} tensors of {run.recipe.name} are in {options.to}; see its README.md")
    if options.push is not None:
        with showing("sending it to the hub"):
            address = push(target, options.push)
        print(f"the hub has this folder, too: {address}")
    return OK


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(prog=PROG, description="Write the model of a run for the library that the model came from.")
    parser.add_argument(
        "run", metavar="RUN", help="the folder of a run that has saved weights or a checkpoint, or a checkpoint"
    )
    parser.add_argument("--to", required=True, metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the weights (default: the pretrained model's; for an adapter float32)",
    )
    parser.add_argument(
        "--merged", action="store_true", help="for a run with model.lora: the whole model with the adapter merged in"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="for an adapter of the text model in a model of images and text: names as in the whole model",
    )
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="send the folder to this repository of the Hugging Face hub, too"
    )
    return parser
