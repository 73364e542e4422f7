"""The keys of `model.vision`: the built-in models of images."""

from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, model_validator

from train.config.section import Section

LARGEST_IMAGE = 4096
Pixels = Annotated[int, Field(ge=1, le=LARGEST_IMAGE)]

USUAL_SIZES = MappingProxyType({"alexnet": 224, "vgg16": 224, "resnet50": 224, "inception_v3": 299})
"""Pixels per side of the images of each kind as published."""

SMALLEST_SIZES = MappingProxyType({"alexnet": 63, "vgg16": 32, "resnet50": 32, "inception_v3": 75})
"""Pixels per side that leave one before the last layers."""

_DROPOUT = {"alexnet": 0.5, "vgg16": 0.5, "inception_v3": 0.5}


class VisionConfig(Section):
    """A model that sorts images of `image_size` × `image_size` pixels into `classes`; its layers have `width` times as many channels as
    published. See `train.models.vision`.
    """

    kind: Literal["alexnet", "vgg16", "resnet50", "inception_v3"]
    image_size: Pixels | None = None
    classes: Annotated[int, Field(ge=2, le=10**6)] = 1000
    width: Annotated[float, Field(gt=0, le=16)] = 1.0
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None

    @property
    def image_size_used(self) -> int:
        """Pixels per side: as many as published where it is not said."""
        return USUAL_SIZES[self.kind] if self.image_size is None else self.image_size

    @property
    def dropout_used(self) -> float:
        """Share of units dropped before the last layers: as published where it is not said."""
        return _DROPOUT.get(self.kind, 0.0) if self.dropout is None else self.dropout

    @model_validator(mode="after")
    def _fits_the_kind(self) -> "VisionConfig":
        if self.image_size_used < (smallest := SMALLEST_SIZES[self.kind]):
            raise ValueError(f"kind {self.kind} needs an image_size of at least {smallest}, found {self.image_size}; raise it")
        if self.dropout and self.kind not in _DROPOUT:
            raise ValueError(f"kind {self.kind} has no dropout, found {self.dropout:g}; leave it out")
        return self
