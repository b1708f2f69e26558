"""A model in layers, by its options alone."""

from typing import Any

from thinwire.models.layers import Blueprint
from thinwire.models.model import find_model
from thinwire.models.options import ModelOptions
from thinwire.models.source import Use


def blueprint(options: ModelOptions, **use: Any) -> Blueprint:
    """The model in layers; `use` are the fields of `Use`."""
    return find_model(options).blueprint(Use(**use))
