"""The one exception of `thinwire.models`, and the way several mistakes become one message."""


class ModelError(ValueError):
    """A model, its cut, its data or its options cannot work; the message says the rule, the value and the way out."""


def require(*rules: tuple[bool, str]) -> None:
    """Raise one `ModelError` with the sentence of every rule that does not hold; each rule is (holds, sentence)."""
    broken = [sentence for holds, sentence in rules if not holds]
    if broken:
        raise ModelError("; ".join(broken))
