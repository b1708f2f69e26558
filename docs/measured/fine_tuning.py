"""Fine-tuning on conversations, scored by exact answers.

    python docs/measured/fine_tuning.py chats FOLDER            # writes train.jsonl, held.jsonl, fine.yaml
    python docs/measured/fine_tuning.py long FOLDER             # the same for 500 steps, 200 questions held out
    cd FOLDER && thinwire simulate fine.yaml --codec .. --output ..
    python docs/measured/fine_tuning.py table FOLDER NAME=RUN[,RUN ...] ...

The conversations ask about functions of Python's standard library, whose signature and first sentence of documentation
stand in the question: which argument has a default, what the default is, which argument comes second, which is last.
An answer is one word that the question has, so a model that has learnt the task is right, and one that cannot
read its question any more is wrong. Functions of held-out conversations are not among those of the training.
"""

import argparse
import importlib
import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

MODULES = """
argparse ast asyncio asyncio.base_events base64 bisect calendar cmd codecs collections concurrent.futures configparser
contextlib copy csv datetime difflib dis email.message email.policy email.utils enum filecmp fileinput fnmatch
fractions ftplib functools getopt gettext glob graphlib gzip heapq html http.client http.cookiejar http.cookies
http.server imaplib importlib.resources importlib.util inspect io ipaddress json linecache locale logging
logging.handlers lzma mailbox mimetypes multiprocessing.pool multiprocessing.managers numbers optparse os os.path
pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats queue random re
reprlib runpy sched secrets selectors shelve shlex shutil site smtplib socket socketserver sqlite3.dump ssl statistics
string subprocess symtable sysconfig tarfile tempfile textwrap threading timeit token tokenize trace traceback
types typing unittest unittest.case unittest.mock unittest.suite urllib.parse urllib.request urllib.robotparser uuid
venv warnings wave weakref webbrowser xml.dom.minidom xml.etree.ElementTree xml.sax.saxutils xmlrpc.client xmlrpc.server
zipapp zipfile zoneinfo
""".split()  # noqa: SIM905
TRAINED, HELD_OUT, LONG_HELD_OUT = 500, 60, 200
RECIPE = """\
name: fine
description: SmolLM2 fine-tuned on 500 conversations about Python's functions, 4 stages.
model: {name: smollm2, weights: pretrained}
data: {name: train.jsonl, evaluation: held.jsonl, kind: chat, tokenizer: smollm2, block_size: 256, packing: true}
pipeline: {num_stages: 4, num_microbatches: 4, microbatch_size: 1, schedule: gpipe}
optimizer: {lr: 0.0001, warmup_steps: 4, max_grad_norm: 1.0, schedule: linear}
training: {epochs: 2, seed: 0, precision: bf16, threads: 1, answer_tokens: 8, prompts: PROMPTS}
"""
LONG_RECIPE = (
    RECIPE.replace("500 conversations", "all conversations")
    .replace("num_microbatches: 4", "num_microbatches: 1")
    .replace("lr: 0.0001, warmup_steps: 4", "lr: 0.00005, warmup_steps: 10")
    .replace("epochs: 2", "steps: 500, evaluate_every: 500 steps")
)


def functions() -> Iterator[tuple[str, inspect.Signature, str]]:
    """Public functions and methods of the modules: their dotted name, signature, first sentence of documentation."""
    for name in MODULES:
        module = importlib.import_module(name)
        owners = [(name, module), *((f"{name}.{one}", each) for one, each in sorted(vars(module).items()))]
        for place, owner in owners:
            if owner is not module and (not inspect.isclass(owner) or owner.__module__ != name):
                continue
            for own, found in sorted(vars(owner).items()):
                if (
                    own.startswith("_")
                    or not inspect.isfunction(found)
                    or not (found.__module__ or "").startswith(name)
                ):
                    continue
                sentence = " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split())
                if 20 <= len(sentence) <= 160:
                    yield f"{place}.{own}", inspect.signature(found), sentence


def questions(name: str, signature: inspect.Signature, sentence: str) -> list[tuple[str, str]]:
    """Questions about a function and their answers; none if it has no arguments to ask about."""
    arguments = [
        one
        for one in signature.parameters.values()
        if one.name not in {"self", "cls"} and one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}
    ]
    written = ", ".join(one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in arguments)
    short = [one for one in arguments if one.default is not one.empty and len(repr(one.default)) < 12]
    alone = [one for one in short if sum(repr(other.default) == repr(one.default) for other in short) == 1]
    if not 2 <= len(arguments) <= 6 or len(written) > 90 or set("<>/") & set(written):
        return []
    own = name.rsplit(".", 1)[-1]
    asked = [
        (f"{own}({written})\nWhich argument is the second?", arguments[1].name),
        (f"{own}({written})\nWhich argument is the last?", arguments[-1].name),
        (f"def function({written}):\n    {sentence}\nWhich argument is the first?", arguments[0].name),
    ]
    for one in alone:
        asked.append((f"{own}({written})\nWhich argument has the default {one.default!r}?", one.name))
        asked.append((f"{own}({written})\nWhat is the default of {one.name}?", repr(one.default)))
    return asked


def short() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Questions and answers to train on and to hold out: one question to each function."""
    drawn, found = random.Random(0), dict[str, str]()
    for each in functions():
        if asked := questions(*each):
            found.setdefault(*drawn.choice(asked))
    pairs = sorted(found.items())
    drawn.shuffle(pairs)
    assert len(pairs) >= TRAINED + HELD_OUT, f"{len(pairs)} conversations"
    return pairs[:TRAINED], pairs[TRAINED : TRAINED + HELD_OUT]


def every() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The same for 500 steps: one question to each of 200 functions held out, all questions to the others."""
    drawn = random.Random(0)
    asked = [some for each in functions() if (some := questions(*each))]
    drawn.shuffle(asked)
    held = dict[str, str]()
    while len(held) < LONG_HELD_OUT:
        held.setdefault(*drawn.choice(asked.pop()))
    pairs = sorted({one: answer for some in asked for one, answer in some if one not in held}.items())
    drawn.shuffle(pairs)
    return pairs, list(held.items())


def write(folder: Path, *, long: bool) -> None:
    """The conversations and the recipe."""
    trained, held = every() if long else short()
    folder.mkdir(parents=True, exist_ok=True)
    for name, some in (("train", trained), ("held", held)):
        lines = [
            {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": answer}]}
            for one, answer in some
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = json.dumps([one for one, _ in held])
    recipe = LONG_RECIPE if long else RECIPE
    (folder / "fine.yaml").write_text(recipe.replace("PROMPTS", prompts))


def lines(path: Path) -> list[dict]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def sent(run: Path) -> str:
    """Bits that a run sent for an element of activations, and of gradients."""
    channels = json.loads((run / "summary.json").read_text())["channels"]
    bits = (
        [one["bits_per_element"] for one in channels if one["channel"] == way] for way in ("activations", "gradients")
    )
    return " / ".join(f"{mean(each):.1f}" for each in bits)


def table(folder: Path, named: list[str]) -> None:
    """Losses and exact matches at the end of runs, one row for each name."""
    answers = {line["messages"][0]["content"]: line["messages"][1]["content"] for line in lines(folder / "held.jsonl")}
    print("| codecs | bits forward / back | loss on | off | exact answers on | off |\n|---|---|---|---|---|---|")
    for one in named:
        name, _, runs = one.rpartition("=")
        cells: list[list[str]] = [[] for _ in range(4)]
        for run in map(Path, runs.split(",")):
            last = lines(run / "evaluations.jsonl")[-1]
            said = [line for line in lines(run / "answers.jsonl") if line["step"] == last["step"]]
            for at, how in enumerate(("on", "off")):
                right = sum(line[how].strip() == answers[line["prompt"]] for line in said)
                cells[at].append(f"{last[how]['loss']:.4f}")
                cells[at + 2].append(f"{right / len(said):.1%}")
        print(f"| `{name}` | {sent(run)} | {' | '.join(', '.join(each) for each in cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["chats", "long", "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="*", metavar="NAME=RUN[,RUN ...]")
    given = parser.parse_args()
    if given.verb == "table":
        table(given.folder, given.runs)
    else:
        write(given.folder, long=given.verb == "long")
