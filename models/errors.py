"""The one exception of `thinwire.models`."""

from thinwire.errors import ThinwireError


class ModelError(ThinwireError, ValueError):
    """A model, its cut, its data or its options cannot work; the message says the rule, the value and the way out."""

    separator = "; "


require = ModelError.require
