"""Folders of images, one folder per class, as `data.target`."""

from examples.papers.arguments import DATA, MOST_PIXELS, check_choice, check_fractions, check_integers, check_positive
from examples.papers.data import image_folders
from examples.papers.data.image_rows import FOLDER, Crops, Rows, row_spec
from jpipe import InputError
from jpipe_train.console.terminal import count
from jpipe_train.data.data import Data
from jpipe_train.data.rows import BatchesOfRows


def load(
    seed: int,
    batch_size: int,
    folder: str,
    validation_folder: str | None = None,
    validation_fraction: float | None = None,
    image_size: int = 224,
    smallest_crop: float = 0.08,
    flip: bool = True,
    skip_broken: bool = False,
    shapes_only: bool = False,
) -> Data:
    """Find the images of a folder: random crops for training, the middle of each image for validation, read together with their rows.

    Args:
        seed: of the order and of the crops.
        batch_size: rows of a batch.
        folder: holds a folder of images for each class.
        validation_folder: the same for validation, in place of a share of `folder`.
        validation_fraction: that share of the files, by default 0.05.
        image_size: pixels per side of what the model gets.
        smallest_crop: the least share of an image that a random crop has.
        flip: whether half of the crops are mirrored.
        skip_broken: look for images that cannot be decoded at the start, and leave them out.
        shapes_only: read nothing, because only the shapes of a batch are needed; jpipe says so.

    Raises:
        InputError: an argument is out of range; see `examples.papers.data.image_folders.read`; there is less than a batch for training or
            for validation; both ways to get images for validation are named.
    """
    check_integers(DATA, 1, MOST_PIXELS, image_size=image_size)
    check_positive(DATA, 1, smallest_crop=smallest_crop)
    check_choice(DATA, (True, False), flip=flip, skip_broken=skip_broken)
    if validation_fraction is not None:
        check_positive(DATA, 1, validation_fraction=validation_fraction)
        check_fractions(DATA, validation_fraction=validation_fraction)
    spec = row_spec(image_size)
    if shapes_only:
        nothing = BatchesOfRows([], batch_size, spec)
        return Data([nothing[0]], [nothing[0]], folder, "not read", lambda: "")
    if validation_folder is not None and validation_fraction is not None:
        raise InputError("data.arguments: validation_fraction has no effect with validation_folder; leave one of them out")
    split = image_folders.read(folder, validation_folder, 0.05 if validation_fraction is None else validation_fraction, skip_broken)
    have = len(split.train), len(split.validation)
    if min(have) < batch_size:
        more = "" if validation_folder is not None else ", raise data.arguments.validation_fraction"
        raise InputError(
            f"{FOLDER}: expected at least {batch_size} images for training and for validation (train.batch_size), found {have[0]} and "
            f"{have[1]} in {split.source}; give more images{more}, or lower train.batch_size"
        )
    crops = Crops(image_size, smallest_crop, flip), Crops(image_size, None)
    train = Rows(split.train.file, split.train.labels, crops[0], seed, epochs=True)
    validation = Rows(split.validation.file, split.validation.labels, crops[1], 0, epochs=False)
    batches = [BatchesOfRows(rows, batch_size, spec) for rows in (train, validation)]
    classes = len(split.train.classes)
    amount = f"{have[0]:,} images for training, {have[1]:,} for validation, of {count(classes, 'class', 'es')}"
    return Data(batches[0], batches[1], split.source, amount, split.digest, split.remarks, classes, rows=have[0])
