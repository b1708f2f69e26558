"""Fine-tune from a folder of weights, in two processes, and load the result with transformers again.

    python examples/fine_tune.py FOLDER OUTPUT
    python examples/fine_tune.py FOLDER OUTPUT --data.name my.txt --data.tokenizer FOLDER --training.epochs 3

FOLDER holds a language model as `save_pretrained` writes it. OUTPUT gets the run and the fine-tuned model. Further
options override fields of fine_tune.yaml.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoModelForCausalLM

from thinwire.launch import cli

RECIPE = Path(__file__).with_suffix(".yaml")


def fine_tune(folder: Path, output: Path, options: Sequence[str]) -> Path:
    """Train, export and score. Gives the folder of the fine-tuned model."""
    run, model = output / "run", output / "model"
    commands = [
        ["train", str(RECIPE), "--model.name", str(folder), "--output", str(run), *options],
        ["export", str(run), "--to", str(model)],
        ["eval", str(model)],
    ]
    for command in commands:
        status = cli.main(command)
        if status:
            raise SystemExit(status)  # the command has printed the reason
    return model


def main(arguments: Sequence[str]) -> None:
    """Fine-tune, load the result with transformers, and print its number of parameters."""
    if len(arguments) < 2:
        raise SystemExit("give two folders: a language model, and the output")
    folder, output, *options = arguments
    tuned = fine_tune(Path(folder), Path(output), options)
    model = AutoModelForCausalLM.from_pretrained(tuned)
    print(f"{tuned} has {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main(sys.argv[1:])
