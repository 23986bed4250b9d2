"""Datasets of ``teleloader-server --demo``: small images of handwritten digits.

1,797 greyscale images of 8x8 pixels, written by 13 people (UCI "Optical Recognition of Handwritten Digits"; licence
and citation in LICENSE.txt in this folder). Every seventh image belongs to the test set: 256 images, and 1,541 for
training. Both sets contain digits of the same writers, so the accuracy does not generalize to other writers.
"""

from importlib.resources import files
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Coprime to 10, because the file has long runs of 0, 1, ..., 9, 0, 1, ...: every tenth image would be the same digit.
TEST_STRIDE: Final = 7

BRIGHTEST: Final = 16
"""Largest pixel value in the file; samples are scaled so that it becomes 1."""

MOVED_PART: Final = 1 / 4
MOVES: Final = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Translations of jittered images, as (pixels down, pixels right)."""


class Digits:
    """Map-style dataset of (image, label) pairs: float32 images of shape (8, 8) in [0, 1], and int labels in [0, 9].

    With ``jitter``, a random quarter of the images is moved by one pixel up, down, left or right. The moves are drawn
    from NumPy's global generator, which workers seed before each batch, so a batch of an epoch has the same content on
    every worker.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.uint8], *, jitter: bool = False) -> None:
        self._images = images
        self._labels = labels
        self._jitter = jitter

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        """Return image ``index`` and its label."""
        image = self._images[index].astype(np.float32) / BRIGHTEST
        if self._jitter and np.random.random() < MOVED_PART:
            image = _moved(image, *MOVES[np.random.randint(len(MOVES))])
        return image, int(self._labels[index])


def digits_train() -> Digits:
    """Return the training set: 1,541 images, some of them shifted randomly by one pixel."""
    return Digits(*_load(test=False), jitter=True)


def digits_test() -> Digits:
    """Return the test set: 256 images, unchanged."""
    return Digits(*_load(test=True))


def _load(*, test: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the images and labels of the training set or the test set."""
    with files(__name__).joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    is_test = np.arange(len(images)) % TEST_STRIDE == TEST_STRIDE - 1
    chosen = is_test if test else ~is_test
    return images[chosen], labels[chosen]


def _moved(image: NDArray[np.float32], down: int, right: int) -> NDArray[np.float32]:
    """Return an image moved by at most one pixel in each direction; uncovered pixels are 0."""
    height, width = image.shape
    return np.pad(image, 1)[1 - down : 1 - down + height, 1 - right : 1 - right + width]
