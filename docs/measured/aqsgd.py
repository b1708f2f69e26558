"""Direct quantization beside AQ-SGD on a pretrained model: python docs/measured/aqsgd.py NAME=RUN[,RUN ...] ...

Each RUN is the folder of a run of `thinwire simulate`; those of one name differ in the seed. Printed is the held-out
loss at the end, compression on and off, by seed.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Print a row for each name."""
    print("| activations | held-out loss by seed, compression on | off |\n|---|---|---|")
    for one in sys.argv[1:]:
        name, _, runs = one.rpartition("=")
        ends = [json.loads(Path(run, "evaluations.jsonl").read_text().splitlines()[-1]) for run in runs.split(",")]
        on, off = (", ".join(f"{end[how]['loss']:.4f}" for end in ends) for how in ("on", "off"))
        print(f"| `{name}` | {on} | {off} |")


if __name__ == "__main__":
    main()
