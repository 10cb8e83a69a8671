"""Draw the pictures that are shipped for the demo, the same bytes every time.

    python tools/draw_pictures.py

``harbour.png`` is a scene with what restoration has to cope with: flat and graded areas, sharp edges
in all directions, thin lines, and textures fine and coarse.  ``harbour-noisy.png`` has Gaussian noise
of σ = 25/255, rounded and clipped to bytes as a camera would; ``scratches.png`` is a mask, white where
pixels are unknown.
"""  # noqa: INP001

from pathlib import Path

import numpy as np
from PIL import Image

HEIGHT, WIDTH, FINER = 192, 256, 4  # drawn finer and averaged, so that edges are smooth
SIGMA = 25 / 255
FOLDER = Path(__file__).parents[1] / "src" / "gncprior" / "pictures"

Picture = np.ndarray


def scene() -> Picture:
    """The harbour on the scale [0, 1]."""
    y, x = np.mgrid[0 : HEIGHT * FINER, 0 : WIDTH * FINER] / FINER
    rng = np.random.default_rng(7)
    image = 0.62 + 0.3 * y / 105  # the sky brightens towards the horizon
    image -= 0.10 * _clouds(x, y, rng)
    image = np.where((x - 62) ** 2 + (y - 40) ** 2 < 15**2, 0.98, image)
    far = 84 - 10 * np.sin(x / 37) - 5 * np.sin(x / 13 + 1)
    image = np.where(y > far, 0.55 - 0.08 * (y - far) / 30, image)
    near = 93 - 7 * np.sin(x / 29 + 2) - 2 * np.sin(x / 5)
    trees = 0.30 + 0.10 * np.sin(x * 2.1 + 3 * np.sin(y / 2)) * np.sin(y * 1.7 + 2 * np.sin(x / 3))
    image = np.where(y > near, trees, image)
    depth = (y - 108) / (HEIGHT - 108)  # of the water: waves grow towards the viewer
    waves = np.sin(
        np.clip(y - 104, 0, None) ** 1.35 / 2.2 + 1.8 * np.sin(x / (5 + 14 * np.clip(depth, 0, 1)))
    )
    water = 0.42 + 0.14 * np.clip(depth, 0, 1) + 0.09 * waves * np.clip(depth + 0.25, 0, 1)
    image = np.where(y > 108, water, image)
    glitter = np.exp(-(((x - 62) / (6 + 22 * np.clip(depth, 0, 1))) ** 2))
    image = np.where(y > 108, image + 0.25 * glitter * (waves > 0.3), image)
    image = _lighthouse(image, x, y)
    image = _boat(image, x, y, 96, 150, 1.0)
    image = _boat(image, x, y, 152, 126, 0.45)
    image = _quay(image, x, y, rng)
    fine = image.reshape(HEIGHT, FINER, WIDTH, FINER)
    return np.clip(fine.mean(axis=(1, 3)), 0.02, 0.98)


def _clouds(x: Picture, y: Picture, rng: np.random.Generator) -> Picture:
    total = np.zeros_like(x)
    for _ in range(12):
        a, b = rng.normal(0, 0.035), rng.normal(0, 0.09)
        total += np.cos(a * x + b * y + rng.uniform(0, 6.3)) / 4
    return np.clip(total, 0, None)


def _lighthouse(image: Picture, x: Picture, y: Picture) -> Picture:
    half = 10 + (y - 40) / 14
    tower = (np.abs(x - 206) < half) & (y > 40) & (y < 134)
    stripes = np.where((y // 13) % 2 == 0, 0.90, 0.25)
    round_ = 0.25 * ((x - 206) / half) ** 2 + 0.12 * (x - 206) / half
    image = np.where(tower, stripes - round_, image)
    image = np.where((np.abs(x - 206) < 14) & (np.abs(y - 39) < 1.5), 0.12, image)  # the gallery
    lamp = (np.abs(x - 206) < 7) & (y > 24) & (y < 38)
    image = np.where(lamp, np.where((x - 206) % 4 < 0.9, 0.15, 0.95), image)
    roof = (y > 14) & (y < 24) & (np.abs(x - 206) < (y - 14) * 0.9)
    image = np.where(roof, 0.18, image)
    for row in (60, 86):
        window = ((x - 203) ** 2 / 6 + (y - row) ** 2 / 14) < 1
        image = np.where(window, 0.10, image)
    return image


def _boat(image: Picture, x: Picture, y: Picture, cx: float, cy: float, size: float) -> Picture:
    u, v = (x - cx) / size, (y - cy) / size
    hull = (v > 0) & (v < 9) & (np.abs(u) < 26 - 0.9 * v)
    image = np.where(hull, np.where(v < 2, 0.93, 0.16), image)
    image = np.where((np.abs(u) < 0.7) & (v > -62) & (v < 0), 0.10, image)
    main = (u > 1.5) & (v < -4) & (v > -58) & (u < (v + 58) * 0.42)
    image = np.where(main, 0.92 - 0.10 * u / 22 - 0.08 * ((v % 9) < 0.8), image)
    jib = (u < -1.5) & (v < -5) & (v > -52) & (-u < (v + 52) * 0.46)
    image = np.where(jib, 0.80 + 0.10 * u / 22, image)
    ropes = np.abs(u + (v + 60) * 0.43) < 0.35
    return np.where(ropes & (v > -60) & (v < 0), 0.20, image)


def _quay(image: Picture, x: Picture, y: Picture, rng: np.random.Generator) -> Picture:
    """A wall of stones in the corner, with grain."""
    top = 122 + 0.16 * (256 - x)
    wall = (y > top) & (x > 168 + 0.1 * (y - 122))
    row = np.floor((y - 122) / 9)
    shift = 8 * (row % 2)
    column = np.floor((x + shift) / 16)
    shade = rng.random((64, 64))[row.astype(int) % 64, column.astype(int) % 64]
    joint = ((y - 122) % 9 < 1.1) | ((x + shift) % 16 < 1.1)
    grain = rng.normal(0, 0.05, (HEIGHT, WIDTH)).repeat(FINER, 0).repeat(FINER, 1)
    stone = np.where(joint, 0.14, 0.40 + 0.25 * shade + grain)
    return np.where(wall, np.where(y < top + 2, 0.80, stone), image)


def scratches() -> Picture:
    """True where a pixel is unknown: lines as on an old photograph, and spots."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(float)
    rng = np.random.default_rng(11)
    mask = np.zeros((HEIGHT, WIDTH), bool)
    for _ in range(16):
        angle, offset, bend = rng.normal(1.2, 0.5), rng.uniform(-60, 300), rng.normal(0, 8)
        across = np.sin(angle) * x - np.cos(angle) * y - offset + bend * np.sin(y / 40)
        along = np.cos(angle) * x + np.sin(angle) * y
        start = rng.uniform(0, 150)
        mask |= (np.abs(across) < rng.uniform(0.7, 1.8)) & (np.abs(along - start) < 90)
    for _ in range(40):
        cx, cy, r = rng.uniform(0, WIDTH), rng.uniform(0, HEIGHT), rng.uniform(1, 3.5)
        mask |= (x - cx) ** 2 + (y - cy) ** 2 < r**2
    return mask


def main() -> None:
    """Write the three files."""
    FOLDER.mkdir(exist_ok=True)
    clean = np.rint(scene() * 255)
    noise = np.random.default_rng(0).standard_normal(clean.shape) * SIGMA * 255
    pictures = {
        "harbour": clean,
        "harbour-noisy": np.clip(np.rint(clean + noise), 0, 255),
        "scratches": scratches() * 255,
    }
    for name, picture in pictures.items():
        Image.fromarray(picture.astype(np.uint8)).save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
