"""What a process of a run does, as its heartbeat says."""

from enum import Enum


class Doing(Enum):
    """What a process does; the value is what a beat carries."""

    IMPORTING = b"i"
    READING = b"r"
    BUILDING = b"b"
    """Its stages; until the first step is done."""
    TRAINING = b"t"
    ENDING = b"e"
    """After the last step."""
