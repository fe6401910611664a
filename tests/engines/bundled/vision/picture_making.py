"""Makes the corpus `images`: `python picture_making.py FILE` writes its source. Integer arithmetic alone, no library.

Eight requests of two to six pictures; sides are multiples of 8 from 8 to 80, so that a step packs very different ones.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[4]))

from engines.bundled.vision.picture import write_png

PATCH = 8
SIZES = (  # width, height of each request's pictures, in patches
    ((1, 1), (4, 3)),
    ((3, 3), (2, 6), (1, 4)),
    ((10, 2), (2, 2), (5, 5), (1, 3)),
    ((6, 6), (1, 2)),
    ((2, 1), (7, 3), (3, 7), (4, 4), (1, 1), (2, 2)),
    ((8, 4), (4, 8), (3, 1)),
    ((5, 1), (1, 5), (9, 3)),
    ((7, 7), (3, 2), (2, 3), (6, 1)),
)
DESCRIPTION = (
    "Eight requests of two to six small pictures made by integer arithmetic: gradients, stripes, checks, discs, noise."
)


def picture(kind: int, seed: int, width: int, height: int) -> np.ndarray:
    """(height, width, 3) uint8."""
    y, x = np.mgrid[0:height, 0:width].astype(np.int64)
    if kind == 0:
        planes = (x * 255 // width, y * 255 // height, (x + y + 31 * seed) % 256)
    elif kind == 1:
        planes = ((x // (2 + seed % 5)) % 2 * 255, (y // 3) % 2 * 200, (x * y + seed) % 256)
    elif kind == 2:
        check = ((x // 4 + y // 4) % 2) * 255
        planes = (check, 255 - check, (check + 17 * seed) % 256)
    elif kind == 3:
        away = (2 * x - width) ** 2 + (2 * y - height) ** 2
        disc = (away < min(width, height) ** 2) * 255
        planes = (disc, away % 256, (255 - disc + seed * 5) % 256)
    else:
        noise = ((x * 374761393 + y * 668265263 + seed * 2246822519) * 3266489917) % (1 << 32)
        planes = (noise >> 24, noise >> 16 & 255, noise >> 8 & 255)
    return np.stack([np.asarray(plane, np.int64) for plane in planes], axis=-1).astype(np.uint8)


def lines() -> list[str]:
    """The source: one request per line, its pictures as data URLs."""
    out, number = [], 0
    for index, sizes in enumerate(SIZES):
        parts = []
        for columns, rows in sizes:
            data = write_png(picture(number % 5, number, columns * PATCH, rows * PATCH))
            url = "data:image/png;base64," + base64.b64encode(data).decode()
            parts.append({"type": "image_url", "image_url": {"url": url}})
            number += 1
        request = {
            "id": f"album-{index}", "messages": [{"role": "user", "content": parts}], "temperature": 0, "logprobs": 4,
            "max_tokens": sum(columns * rows for columns, rows in sizes), "min_tokens": 0, "ignore_eos": True,
        }  # fmt: skip
        out.append(json.dumps(request))
    return out


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join(lines()) + "\n")
