"""Datasets that augment their samples with generators of their own."""

from __future__ import annotations

from typing import Any

import numpy as np


class Images:
    """40 images, augmented by a transform of albumentations."""

    def __init__(self) -> None:
        import albumentations

        self._transform = albumentations.Compose([
            albumentations.HorizontalFlip(),
            albumentations.OneOf([albumentations.GaussNoise(p=1), albumentations.RandomBrightnessContrast(p=1)], p=1),
            albumentations.RandomCrop(8, 8),
        ])  # fmt: skip

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        image = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3) // 4 + np.uint8(index)
        return self._transform(image=image)["image"]


class Noise:
    """Transform that adds numbers of a NumPy generator."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng()

    def __call__(self, index: int) -> Any:
        """Return the index with noise."""
        return index + self._generator.random(3)


class Noisy:
    """40 samples with noise."""

    def __init__(self) -> None:
        self._transforms = [Noise(), Noise()]

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return [transform(index) for transform in self._transforms]
