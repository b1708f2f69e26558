"""How fast replicas train over links of 100 Mbit/s, by the codec of the exchange: a table.

    sudo python docs/measured/replica_speed.py FOLDER [--turns 3] [--steps 3] [--only NAME]

Six runs of `thinwire bench`, with 2 replicas on the hosts of `thinwire cluster run`. `11 M, one stage` and `11 M` are
of the recipe `links`. The first has one stage, so that two cores are one for each process. The second has two stages
and one micro-batch of 8 samples, so that one stage of a replica computes at a time: two cores do for four processes.
The others are of the recipe and the exchanges of replicas.py, with two stages. The results are kept in FOLDER as JSON;
one that is there is not measured again. Nothing else should run on the machine.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from replicas import EXCHANGES, PIPELINES, RECIPE

LINKS = "100mbit"
EVERY_STEP = ("bf16", "ef(q(8))", "ef(q(4))", "ef(q(2))")
FW3_BW6 = PIPELINES["fw3 bw6"]["--codec"]
ONE_AT_A_TIME = ["links", "--pipeline.num_microbatches", "1", "--pipeline.microbatch_size", "8"]
"""A GPT-2 of 11 M parameters and one micro-batch: while one stage of a replica computes, the other waits."""
ONE_STAGE = ["--pipeline.num_stages", "1", "--pipeline.layers", "null"]


def benches(turns: int, steps: int) -> Mapping[str, list[str]]:
    """The recipe and the options of each bench, by name. Replicas that step alone take two rounds of 30 steps."""
    codecs = [EXCHANGES[name].get("--replicas.gradients", name).replace(", start=26", "") for name in EVERY_STEP]
    few = ["--repetitions", str(turns), "--steps", str(steps)]
    rounds = ["--repetitions", "1", "--steps", "1", "--codec", "none", FW3_BW6]
    return {
        "11 M, one stage": [*ONE_AT_A_TIME, *ONE_STAGE, "--replica-codec", "ef(q(4))", *few],
        "11 M": [*ONE_AT_A_TIME, "--codec", "none", FW3_BW6, "--replica-codec", "ef(q(4))", *few],
        "every step": [RECIPE, "--codec", "none", FW3_BW6, "--replica-codec", "none", *codecs, *few],
        "quantized-adam": [RECIPE, "--codec", "none", FW3_BW6, *_options("quantized-adam, 4 bits"), *few],
        "DiLoCo": [RECIPE, *_options("DiLoCo, q(4), every 30"), *rounds],
        "SparseLoCo": [RECIPE, *_options("SparseLoCo, every 30"), *rounds],
    }


def _options(exchange: str) -> list[str]:
    return [word for option in EXCHANGES[exchange].items() for word in option]


def rows(name: str, found: Mapping) -> Iterator[str]:
    """The rows as Markdown."""
    speeds = found["tables"][0]
    for cells in speeds["rows"]:
        row = dict(zip(speeds["columns"], cells, strict=True))
        yield f"| {name} | `{row['who']}` | {row['samples/s']:.3g} | {row['MB a step']:.3g} |"


def main() -> None:
    """Run what is not there, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", help="measure this one alone")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    table = ["| exchange | boundaries, between replicas | samples/s | MB a step |", "|---" * 4 + "|"]
    for name, words in benches(options.turns, options.steps).items():
        path = options.folder / f"{name.replace(', ', '-').replace(' ', '-')}.json"
        if not path.is_file() and options.only in (None, name):
            hosts = "2" if set(ONE_STAGE) <= set(words) else "4"
            cluster = ["thinwire", "cluster", "run", "--hosts", hosts, "--bandwidth", LINKS, "--"]
            bench = ["thinwire", "bench", *words, "--replicas.count", "2", "--links", LINKS]
            subprocess.run([*cluster, *bench, "--out", str(path.absolute())], check=True)
        if path.is_file():
            table += rows(name, json.loads(path.read_text()))
    print("\n".join(table))


if __name__ == "__main__":
    main()
