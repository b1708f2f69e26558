"""Parts of sources, read as the kind of data that a test names."""

from thinwire.models.data import sources
from thinwire.models.data.kinds import find_kind
from thinwire.models.data.parts import Columns

ALL = Columns()


def read(kind, part, columns=ALL):
    """What `sources.read` gives for a kind of this name."""
    return sources.read(find_kind(kind), part, columns)
