"""The model of a run: a type of model, a pretrained model or your own factory is found by its name."""

from __future__ import annotations

from pathlib import Path

from thinwire.models.options import ModelOptions
from thinwire.models.source import ModelSource


def find_model(options: ModelOptions) -> ModelSource:
    """The model that the options name. No weight is read, and no layer is built.

    Raises:
        ModelError: there is no such model, no task here is one of its, or its library refuses the configuration.
    """
    if ":" in options.name and not Path(options.name).exists():
        from thinwire.models.architectures.sequential import FactorySource

        return FactorySource.of(options)
    from thinwire.models.architectures.vision import VISION, VisionSource

    if options.name in VISION:
        return VisionSource.of(options)
    from thinwire.models.architectures.configuration import LibrarySource

    return LibrarySource.of(options)
