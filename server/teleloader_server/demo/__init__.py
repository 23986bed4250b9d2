"""The datasets of ``teleloader-server --demo``: small images of handwritten digits.

1,797 greyscale images of 8x8 pixels, written by 13 people (UCI "Optical Recognition of Handwritten Digits"; licence
and citation in LICENSE.txt beside this file). Every seventh image is kept for the test: 256 of them, and 1,541 to
train on. Both parts hold the same writers' hands, so the accuracy says nothing about the writing of others.
"""

from importlib.resources import files
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Coprime to 10, because long runs of the file go 0, 1, ..., 9, 0, 1, ...: every tenth image would be the same digit.
TEST_STRIDE: Final = 7

BRIGHTEST: Final = 16
"""The largest pixel value in the file; samples are scaled so that it becomes 1."""

MOVED_PART: Final = 1 / 4
MOVES: Final = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""What jitter does to that part of the images: one of these, as (pixels down, pixels right)."""


class Digits:
    """A map-style dataset of ``(image, label)``: a float32 array of shape (8, 8) in [0, 1], and an int in [0, 9].

    With ``jitter`` every fourth image on average is moved by one pixel up, down, left or right. The moves are drawn
    from NumPy's global generator because the worker seeds that one before each batch: the same batch of the same
    epoch comes out alike, whichever worker makes it.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.uint8], *, jitter: bool = False) -> None:
        self._images = images
        self._labels = labels
        self._jitter = jitter

    def __len__(self) -> int:
        """How many images there are."""
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        """Image ``index`` and its label."""
        image = self._images[index].astype(np.float32) / BRIGHTEST
        if self._jitter and np.random.random() < MOVED_PART:
            image = _moved(image, *MOVES[np.random.randint(len(MOVES))])
        return image, int(self._labels[index])


def digits_train() -> Digits:
    """The 1,541 training images, jittered."""
    return Digits(*_load(test=False), jitter=True)


def digits_test() -> Digits:
    """The 256 test images, as they are."""
    return Digits(*_load(test=True))


def _load(*, test: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The images and labels of one part of the file."""
    with files(__name__).joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    is_test = np.arange(len(images)) % TEST_STRIDE == TEST_STRIDE - 1
    chosen = is_test if test else ~is_test
    return images[chosen], labels[chosen]


def _moved(image: NDArray[np.float32], down: int, right: int) -> NDArray[np.float32]:
    """``image`` moved by at most one pixel each way; what comes in at the edge is empty."""
    height, width = image.shape
    return np.pad(image, 1)[1 - down : 1 - down + height, 1 - right : 1 - right + width]
