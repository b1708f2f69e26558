"""Fine-tune a language model in two processes, and let transformers answer with the result.

    python examples/fine_tune.py OUTPUT
    python examples/fine_tune.py OUTPUT --model.name FOLDER --data.tokenizer FOLDER --data.name my.txt

The model is SmolLM2, whose weights a package brings (docs/start/fine-tune.md), or that of a FOLDER as `save_pretrained`
writes it. OUTPUT gets the run and the fine-tuned model. Further options override fields of fine_tune.yaml.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import pipeline

from thinwire.launch import cli

RECIPE = Path(__file__).with_suffix(".yaml")
PROMPT = "The capital of France is"


def fine_tune(output: Path, options: Sequence[str]) -> Path:
    """Train, export and score. Gives the folder of the fine-tuned model."""
    run, model = output / "run", output / "model"
    if model.exists():
        raise SystemExit(f"{model} must be new, but an earlier run exported there; remove it, or name another OUTPUT")
    commands = [
        ["train", str(RECIPE), "--output", str(run), *options],
        ["export", str(run), "--to", str(model)],
        ["eval", str(model)],
    ]
    for command in commands:
        status = cli.main(command)
        if status:
            raise SystemExit(status)  # the command has printed the reason
    return model


def main(arguments: Sequence[str]) -> None:
    """Fine-tune, load the result with transformers, and print what it makes of a prompt."""
    if not arguments or arguments[0].startswith("--"):
        raise SystemExit("give a folder for the output")
    output, *options = arguments
    answer = pipeline("text-generation", model=str(fine_tune(Path(output), options)))
    print(answer(PROMPT, max_new_tokens=8, do_sample=False)[0]["generated_text"])


if __name__ == "__main__":
    main(sys.argv[1:])
