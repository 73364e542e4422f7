"""`data.target: images`: folders of images, one folder per class, for the built-in models of images."""

from jpipe import InputError
from jpipe_train.config.targets.vision_config import ImagesData
from jpipe_train.console.terminal import count
from jpipe_train.data.data import Data
from jpipe_train.data.rows import BatchesOfRows
from jpipe_train.data.targets import image_folders
from jpipe_train.data.targets.image_rows import FOLDER, Crops, Rows, row_spec


def load(arguments: ImagesData, seed: int, batch_size: int) -> Data:
    """Find the images, which are read when their rows are: random crops to learn from, the middle of each for validation.

    Args:
        arguments: the folder, and how rows are made of images.
        seed: of the order and of the crops.
        batch_size: rows of a batch.

    Raises:
        InputError: see `jpipe_train.data.targets.image_folders.read`; there is less than a batch for training or for validation.
    """
    split = image_folders.read(arguments)
    have = len(split.train), len(split.validation)
    if min(have) < batch_size:
        more = "" if arguments.validation_folder is not None else ", raise data.arguments.validation_fraction"
        raise InputError(
            f"{FOLDER}: expected at least {batch_size} images for training and for validation (train.batch_size), found {have[0]} and "
            f"{have[1]} in {split.source}; give more images{more}, or lower train.batch_size"
        )
    crops = Crops(arguments.image_size, arguments.smallest_crop, arguments.flip), Crops(arguments.image_size, None)
    train = Rows(split.train.file, split.train.labels, crops[0], seed, epochs=True)
    validation = Rows(split.validation.file, split.validation.labels, crops[1], 0, epochs=False)
    batches = [BatchesOfRows(rows, batch_size, row_spec(arguments.image_size)) for rows in (train, validation)]
    classes = len(split.train.classes)
    amount = f"{have[0]:,} images for training, {have[1]:,} for validation, of {count(classes, 'class', 'es')}"
    return Data(batches[0], batches[1], split.source, amount, split.digest, split.remarks, classes)
