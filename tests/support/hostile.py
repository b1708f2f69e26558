"""What somebody may have put into the folder of a run that is passed on."""

import hashlib
import json
import os
import shutil

from thinwire.pipeline.saving.checkpoint_folder import Manifest, digest_of

ODD = (None, "x", -1, 1e308, 10**30, [], {}, True, "\x1b[31m", [[]], {"a": 1}, 0.5, "")
"""Values of another kind than a run writes."""


def lead_out(path, outside, draw):
    """Put a link, a pipe, a device or a file without end in the place of a file or folder of a run."""
    folder = path.is_dir()
    shutil.rmtree(path) if folder else path.unlink()
    kinds = ["out", "itself", "nowhere", "pipe", "another kind", "zero"]
    match draw.choice(kinds if folder else [*kinds, "endless"]):
        case "out":
            path.symlink_to(outside / ("folder" if folder else f"file{path.suffix}"))
        case "itself":
            path.symlink_to(path)
        case "nowhere":
            path.symlink_to(outside / "made" / "new")
        case "pipe":
            os.mkfifo(path)
        case "zero":
            path.symlink_to("/dev/zero")
        case "another kind":
            path.write_text("x") if folder else path.mkdir()
        case "endless":
            with path.open("wb") as file:
                file.truncate(1 << 40)


def misspell(path, draw):
    """Give one of the values in a file of JSON another kind."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    which = draw.randrange(len(lines))
    values = json.loads(lines[which])
    place = values
    while True:
        keys = [*place] if isinstance(place, dict) else [*range(len(place))]
        key = draw.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.3:
            break
        place = place[key]
    if draw.random() < 0.3 and isinstance(place, dict):
        del place[key]
    else:
        place[key] = draw.choice(ODD)
    lines[which] = json.dumps(values)
    path.write_text("\n".join(lines) + "\n")


def sign(checkpoint):
    """Give a checkpoint the digests that its files have now."""
    path = checkpoint / "manifest.json"
    values = json.loads(path.read_text())
    values.pop("digest")
    for stage, files in values["files"].items():
        values["files"][stage] = {name: digest_of(checkpoint / f"stage-{stage}" / name) for name in files}
    path.write_text(Manifest(**values).text())


def snapshot(folder):
    """Everything in a folder, with digests."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
