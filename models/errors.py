"""The one exception of `thinwire.models`."""

from thinwire.errors import ThinwireError


class ModelError(ThinwireError, ValueError):
    """A model, its cut, its data or its options are wrong; the message says the rule, the value, what to change."""

    separator = "; "


require = ModelError.require
