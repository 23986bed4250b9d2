"""Makes the documentation's pictures of the dashboard, from a real server: ``python -m docs.screenshots``.

Requires ``pip install --editable . --group dev --group browser``, and Chromium. Two trainers load made-up photographs:
one takes batches faster than they come, the other one thinks for long.
"""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

from teleloader import RemoteDataset
from tests.conftest import ServerProcess
from tests.end_to_end.browser import a_browser
from tests.end_to_end.training import training

if TYPE_CHECKING:
    from numpy.typing import NDArray

HERE: Final = Path(__file__).parent
SECONDS: Final = 45.0
"""How long is trained before the pictures are taken: they plot a minute."""
DESKTOP: Final = {"width": 1120, "height": 900}
PICTURES: Final[dict[str, dict[str, Any]]] = {
    "dashboard-light": {"viewport": DESKTOP, "color_scheme": "light"},
    "dashboard-dark": {"viewport": DESKTOP, "color_scheme": "dark"},
    "dashboard-phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}


class Photographs:
    """Coloured noise, blurred, that takes a while to decode."""

    def __len__(self) -> int:
        return 60_000

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        time.sleep(0.004)
        small = np.random.default_rng(index).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        return np.asarray(Image.fromarray(small).resize((48, 48), Image.Resampling.BICUBIC)), index % 10


def main() -> None:
    """Serve, train, look."""
    server = ServerProcess("train=docs.screenshots:Photographs", "--num-workers", "4", "--port", "0")
    try:
        photographs = RemoteDataset(server.url, "train")
        with (
            training(photographs, 0.01, batch_size=32, shuffle=True, seed=1),
            training(photographs, 0.4, batch_size=32, shuffle=True, seed=2),
            a_browser() as browser,
        ):
            pages = {name: browser.new_page(**options) for name, options in PICTURES.items()}
            for page in pages.values():
                page.goto(server.url)
            time.sleep(SECONDS)
            for name, page in pages.items():
                # in few colours, so that it is small
                picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(48)
                picture.save(HERE / f"{name}.png", optimize=True)
    finally:
        server.end()


if __name__ == "__main__":
    main()
