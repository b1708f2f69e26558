"""What can become of the files of checkpoints on a disk."""

import shutil

NESTED = b"[" * 100_000


def flip(content, draw):
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


DAMAGES = {
    "cut": lambda content, draw: content[: draw.randrange(len(content))],
    "flipped": flip,
    "longer": lambda content, draw: content + draw.randbytes(draw.randrange(1, 100)),
    "of zeros": lambda content, draw: bytes(len(content)),
    "random": lambda content, draw: draw.randbytes(len(content)),
    "empty": lambda content, draw: b"",
    "nested": lambda content, draw: NESTED,
    "another value": lambda content, draw: draw.choice([b"{}", b"[]", b"null", b'{"step": "x"}', b'{"files": 3}']),
}
"""What can become of a file, beside that it is gone, a folder, or that of another stage."""


def damage(folder, draw):
    """Damage one to three files of checkpoints, where there are two or more."""
    for _ in range(draw.randint(1, 3)):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if len(files) < 2:
            return
        victim, kind = draw.choice(files), draw.choice([*DAMAGES, "gone", "a folder", "another's"])
        content = victim.read_bytes()
        victim.unlink()
        if kind == "a folder":
            victim.mkdir()
        elif kind == "another's":
            shutil.copyfile(draw.choice([path for path in files if path != victim]), victim)
        elif kind != "gone":
            victim.write_bytes(DAMAGES[kind](content, draw) if content else b"x")
