"""Models of real size over slow links: memory, seconds and bytes of whole runs, beside what was said before them.

    python docs/measured/real_links.py FOLDER [--only RUN ...]      # root; 24 GB of memory, 15 GB of disk

The runs of Qwen3-0.6B (random weights, bf16) take fifty steps on simulated hosts with 10 Mbit/s between them, all
weights or LoRA, in two and four processes. `gpt2-xl` is the method of the packaged recipe at the real size of GPT2-XL,
three steps in 8 processes. Before each run `partition` is asked for its memory and `predict` for its seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import real_size

RATE = "10mbit"
THINWIRE = [sys.executable, "-m", "thinwire"]
LORA = ["--model.lora.rank", "8", "--optimizer.lr", "0.001"]
RUNS = {
    "full-2": ["--pipeline.num_stages", "2"],
    "full-4": ["--pipeline.num_stages", "4"],
    "lora-2": ["--pipeline.num_stages", "2", *LORA],
    "lora-4": ["--pipeline.num_stages", "4", *LORA],
}
GPT2_XL = {"vocab_size": 50_257, "n_layer": 48, "n_embd": 1600, "n_head": 25, "n_positions": 1024}
XL = [
    "gpt2-xl-tiny",
    *(word for name, value in GPT2_XL.items() for word in (f"--model.config.{name}", str(value))),
    *("--model.dtype", "bf16", "--training.precision", "bf16", "--data.block_size", "64", "--data.held_out", "0.01"),
    *("--pipeline.num_microbatches", "2", "--pipeline.layers", "[7, 6, 6, 6, 6, 7, 7, 5]"),
    *("--training.steps", "3", "--training.epochs", "null", "--training.evaluate_every", "100 steps"),
    *("--checkpoint.every", "100 steps", "--optimizer.lr", "1.0e-05"),
]


def words_of(name: str, folder: Path) -> list[str]:
    """The words after `thinwire train`."""
    if name == "gpt2-xl":
        return XL
    model = folder / "qwen3-28"
    if not model.exists():
        real_size.make_model(model, real_size.QWEN3)
    given = {
        "name": "real-links",
        "model": {"name": str(model), "weights": "pretrained", "dtype": "bf16"},
        "data": {"name": "pydoc", "limit": 100_000, "held_out": 0.02, "block_size": 128},
        "pipeline": {"schedule": "1f1b", "num_microbatches": 4, "microbatch_size": 1},
        "optimizer": {"name": "adamw", "lr": 1.0e-05, "max_grad_norm": 1.0},
        "training": {"steps": 50, "precision": "bf16", "evaluate_every": "0 steps", "threads": 1},
        "checkpoint": {"every": "20 steps"},
    }
    recipe = folder / "links.yaml"
    recipe.write_text(json.dumps(given))
    return [str(recipe), *RUNS[name]]


def said_before(name: str, folder: Path) -> dict[str, Any]:
    """Bytes of memory by stage and seconds of a step, as the commands say them."""
    words = words_of(name, folder)

    def ask(*command: str) -> Any:
        said = subprocess.run([*THINWIRE, *command, "--json"], check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(said.stdout)

    [table] = [
        each
        for each in ask("partition", *words, "--memory", "100")["tables"]
        if each["title"].startswith("the cut of the recipe")
    ]
    memory = [row[table["columns"].index("memory, MB")] * 1e6 for row in table["rows"]]
    codecs = "q(8, step=0.2)/q(8, step=0.2)"
    seconds = ask("predict", *words, "--bandwidth", RATE, "--codec", codecs)["predictions"][0]["seconds"]
    return {"memory": memory, "seconds": seconds}


def run(name: str, folder: Path) -> None:
    """Ask, train, and keep what is said and measured in a file."""
    said = said_before(name, folder)
    words, output = words_of(name, folder), folder / name
    hosts = None if name == "gpt2-xl" else words[words.index("--pipeline.num_stages") + 1]
    links = [sys.executable, "examples/slow_links.py", "--hosts", hosts, "--rate", RATE, "--"] if hosts else []
    subprocess.run([*links, *THINWIRE, "train", *words, "--output", str(output)], check=True)
    summary = json.loads((output / "summary.json").read_text())
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    kept = {"said": said, "summary": summary, "steps": steps}
    (folder / f"{name}.json").write_text(json.dumps(kept))


def show(folder: Path) -> None:
    """Print the tables of all runs that are in a folder."""
    print("| run | GB by stage: said, peak | s a step: said, seen (compute, neighbour, wire) |")
    print("|---|---|---|")
    traffic = ["| run | MB a step forward, bits | back, bits | loss, first and last steps |", "|---|---|---|---|"]
    for path in sorted(folder.glob("*.json")):
        kept = json.loads(path.read_text())
        if "summary" not in kept:
            continue
        said, summary, steps = kept["said"], kept["summary"], kept["steps"]
        stages = zip(said["memory"], summary["stages"], strict=True)
        memory = "; ".join(f"{each / 1e9:.2f}, {stage['peak_memory'] / 1e9:.2f}" for each, stage in stages)
        count, last = len(steps), summary["stages"][-1]["seconds"]
        causes = ", ".join(f"{last[cause] / count:.1f}" for cause in ("compute", "neighbour", "wire"))
        print(
            f"| {path.stem} | {memory} | {said['seconds']:.1f}, {summary['training_seconds'] / count:.1f} ({causes}) |"
        )
        cells = []
        for channel in ("activations", "gradients"):
            rows = [row for row in summary["channels"] if row["channel"] == channel]
            sent = sum(row["bytes"] for row in rows)
            bits = 8 * sent / elements if (elements := sum(row["elements"] for row in rows)) else 0.0
            cells.append(f"{sent / count / 1e6:.3f}, {bits:.2f}")
        losses = [step["loss"] for step in steps]
        some = min(5, count)
        first, end = (sum(part) / some for part in (losses[:some], losses[-some:]))
        traffic.append(f"| {path.stem} | {cells[0]} | {cells[1]} | {first:.3f}, {end:.3f} |")
    print("", *traffic, sep="\n")


def main() -> None:
    """Take the runs that are not done, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*RUNS, "gpt2-xl"], default=[*RUNS, "gpt2-xl"])
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        if not (folder / f"{name}.json").exists():
            run(name, folder)
    show(folder)


if __name__ == "__main__":
    main()
