"""Tables that were written as JSON, by `thinwire predict --json`, a study or links.py --out, read again."""

import json

from thinwire.launch.shared.tables import Table


def read_document(text: str) -> tuple[str, list[Table]]:
    """The title and the tables of a document. ValueError, KeyError or TypeError if it is none."""
    found = json.loads(text)
    return found["title"], [Table(**table) for table in found["tables"]]
