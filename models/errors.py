"""The one exception of `thinwire.models`."""

from thinwire.errors import ThinwireError


class ModelError(ThinwireError, ValueError):
    """A model, its cut, its data or its options are wrong. The message says the rule, the value and what to change."""

    separator = "; "


require = ModelError.require
