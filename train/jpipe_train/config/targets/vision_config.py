"""The arguments of the built-in models of images and of image folders: what `model.arguments` and `data.arguments` may hold."""

from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from jpipe_train.config.section import FilePath, Fraction, Section

_LARGEST = 4096
_MOST_BLOCKS = 64  # of a group


def _pixels(size: int, least: int) -> int:
    if not least <= size <= _LARGEST:
        raise ValueError(f"expected {least} to {_LARGEST} pixels per side")
    return size


def _at_least(least: int) -> AfterValidator:
    return AfterValidator(partial(_pixels, least=least))


_Classes = Annotated[int, Field(ge=2, le=10**6)]
_Width = Annotated[float, Field(gt=0, le=16)]
_Dropped = Annotated[float, Field(ge=0, lt=1)]


def _blocks(*most: int) -> AfterValidator:
    """A number of blocks for each group: at least one, at most so many."""

    def check(counts: list[int]) -> list[int]:
        if len(counts) != len(most) or not all(1 <= count <= limit for count, limit in zip(counts, most, strict=True)):
            raise ValueError(f"expected {len(most)} numbers of blocks: {', '.join(f'1 to {limit}' for limit in most)}")
        return counts

    return AfterValidator(check)


class Alexnet(Section):
    """`model.target: alexnet`: the model of Krizhevsky 2014.

    Attributes:
        image_size: pixels per side; as few leave one before the first dense layer.
        classes: that images are of.
        width: of layers, in channels relative to the published ones.
        dropout: of what the first two dense layers give.
    """

    image_size: Annotated[int, _at_least(63)] = 224
    classes: _Classes = 1000
    width: _Width = 1.0
    dropout: _Dropped = 0.5


class Vgg16(Section):
    """`model.target: vgg16`: the model of Simonyan and Zisserman 2014.

    Attributes:
        image_size: as of `Alexnet`, and so are the others.
        classes: likewise.
        width: likewise.
        dropout: likewise.
        batch_norm: whether a batch norm follows each convolution, as in torchvision's `vgg16_bn`; small ones learn sooner with it.
    """

    image_size: Annotated[int, _at_least(32)] = 224
    classes: _Classes = 1000
    width: _Width = 1.0
    dropout: _Dropped = 0.5
    batch_norm: bool = False


class Resnet50(Section):
    """`model.target: resnet50`: the model of He et al. 2015.

    Attributes:
        image_size: as of `Alexnet`, and so are the others.
        classes: likewise.
        width: likewise.
        blocks: how many of each of the four groups, of which each but the first halves the image.
    """

    image_size: Annotated[int, _at_least(32)] = 224
    classes: _Classes = 1000
    width: _Width = 1.0
    blocks: Annotated[list[int], _blocks(*[_MOST_BLOCKS] * 4)] = [3, 4, 6, 3]


class InceptionV3(Section):
    """`model.target: inception_v3`: the model of Szegedy et al. 2015.

    Attributes:
        image_size: as of `Alexnet`, and so are the others.
        classes: likewise.
        width: likewise.
        dropout: before the last layer.
        blocks: how many of the published ones that keep the image's size there are in each of the three groups, the first ones:
            `mixed_5b` and so on, `mixed_6b` and so on, `mixed_7b` and so on.
    """

    image_size: Annotated[int, _at_least(75)] = 299
    classes: _Classes = 1000
    width: _Width = 1.0
    blocks: Annotated[list[int], _blocks(3, 4, 2)] = [3, 4, 2]
    dropout: _Dropped = 0.5


class ImagesData(Section):
    """`data.target: images`: a folder that holds a folder of images for each class.

    Attributes:
        folder: that folder.
        validation_folder: the same for validation, in place of a share of `folder`.
        validation_fraction: that share, of the files.
        image_size: pixels per side of what the model gets.
        smallest_crop: share of an image that a random crop has at least.
        flip: whether half of the crops are mirrored.
        skip_broken: whether images that cannot be decoded are looked for at the start, and left out.
    """

    folder: FilePath
    validation_folder: FilePath | None = None
    validation_fraction: Fraction = 0.05
    image_size: Annotated[int, _at_least(1)] = 224
    smallest_crop: Annotated[float, Field(gt=0, le=1)] = 0.08
    flip: bool = True
    skip_broken: bool = False

    @model_validator(mode="after")
    def _validation_is_said_once(self) -> "ImagesData":
        if self.validation_folder is not None and "validation_fraction" in self.model_fields_set:
            raise ValueError("validation_fraction would mean nothing beside validation_folder; leave one of them out")
        return self
