"""Decode JPEG files with simplejpeg and OpenCV in place of Pillow, and compare speed and pixels.

Requirements:  pip install simplejpeg opencv-python-headless pillow
Run:           python examples/native_jpeg.py

`PillowImages` and `NativeImages` are the same dataset: a random crop of each image, resized to 224 x 224. To host one
of them, run teleloader-server native_jpeg:NativeImages in the folder of this file.
"""

import io
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
"""Array of shape (height, width, 3), in RGB order."""

SIZE = 224
WIDTH, HEIGHT = 500, 375
IMAGES = 100


class Images(ABC):
    """Dataset of JPEG files in memory."""

    def __init__(self) -> None:
        self.files = [photograph(number) for number in range(IMAGES)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Image:
        generator = np.random.default_rng(index)
        crop = int(generator.integers(160, HEIGHT))
        left, top = int(generator.integers(0, WIDTH - crop)), int(generator.integers(0, HEIGHT - crop))
        return self.decode(self.files[index], left, top, crop)

    @abstractmethod
    def decode(self, file: bytes, left: int, top: int, crop: int) -> Image:
        """Return the square of `crop` pixels at (left, top), resized to SIZE."""


class PillowImages(Images):
    """Dataset that decodes with Pillow."""

    def decode(self, file: bytes, left: int, top: int, crop: int) -> Image:
        """Decode and resize with Pillow, whose filter is antialiased."""
        import PIL.Image

        with PIL.Image.open(io.BytesIO(file)) as image:
            box = (left, top, left + crop, top + crop)
            return np.asarray(image.convert("RGB").resize((SIZE, SIZE), PIL.Image.Resampling.BILINEAR, box))


class NativeImages(Images):
    """Dataset that decodes with simplejpeg and OpenCV."""

    def __init__(self) -> None:
        import cv2

        super().__init__()
        cv2.setNumThreads(1)  # each worker is a process, and the server starts one per CPU

    def decode(self, file: bytes, left: int, top: int, crop: int) -> Image:
        """Decode with simplejpeg, resize with OpenCV."""
        import cv2
        import simplejpeg

        pixels = simplejpeg.decode_jpeg(file, "RGB")  # the same pixels as Pillow's
        part = pixels[top : top + crop, left : left + crop]
        # INTER_LINEAR is not antialiased: from a factor of 2, it would skip pixels, and INTER_AREA averages them
        filter_ = cv2.INTER_LINEAR if crop < 2 * SIZE else cv2.INTER_AREA
        resized: Any = cv2.resize(part, (SIZE, SIZE), interpolation=filter_)
        return np.asarray(resized, np.uint8)


def photograph(number: int) -> bytes:
    """Return a JPEG file with about the detail and size of a photograph."""
    import PIL.Image

    coarse = np.random.default_rng(number).integers(0, 256, (48, 64, 3), np.uint8)
    file = io.BytesIO()
    enlarged = PIL.Image.fromarray(coarse).resize((WIDTH, HEIGHT), PIL.Image.Resampling.BICUBIC)
    enlarged.save(file, "JPEG", quality=90)
    return file.getvalue()


def images_per_second(dataset: Images) -> float:
    """Return the images that one CPU core decodes per second."""
    start = time.process_time()
    for index in range(len(dataset)):
        dataset[index]
    return len(dataset) / (time.process_time() - start)


def differences(one: Images, other: Images) -> tuple[float, int]:
    """Return the mean and the maximum absolute difference of the pixels."""
    pairs = [(one[index].astype(np.int16), other[index].astype(np.int16)) for index in range(len(one))]
    found = np.abs([first - second for first, second in pairs])
    return float(found.mean()), int(found.max())


def main() -> None:
    """Print the speed of both datasets, and the differences between their pixels."""
    pillow, native = PillowImages(), NativeImages()
    for dataset in (pillow, native):
        dataset[0]  # imports the packages
        print(f"{type(dataset).__name__} {max(images_per_second(dataset) for _ in range(3)):.0f} images/s per core")
    mean, largest = differences(pillow, native)
    print(f"mean difference {mean:.2f} of 255")
    print(f"maximum difference {largest:.1f} of 255")


if __name__ == "__main__":
    main()
