"""Pictures on disk as arrays of bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from gncprior.errors import GncpriorError

SUFFIXES = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def list_images(folder: Path | str, *, recursive: bool = False) -> list[Path]:
    """The image files of a folder, sorted by name; hidden files are left out."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise GncpriorError(f"{folder} {what}: name a folder of images.")
    files = folder.rglob("*") if recursive else folder.iterdir()
    return sorted(
        file
        for file in files
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".") and file.is_file()
    )


def read_image(path: Path | str, channels: int = 1) -> np.ndarray:
    """A picture as uint8: (H, W) grey as PIL's ``convert("L")`` has it, or (H, W, 3) in colour."""
    if channels not in (1, 3):
        raise GncpriorError(f"An image has 1 channel (grey) or 3 (RGB), not {channels}.")
    try:
        with Image.open(path) as image:
            if image.mode.startswith("I;16"):  # convert("L") would cut off all above 255
                grey = (np.asarray(image) >> 8).astype(np.uint8)
                return grey if channels == 1 else np.repeat(grey[..., None], 3, axis=2)
            if image.mode in ("I", "F"):
                raise GncpriorError(
                    f"{path} has pixels of 32 bits and no known scale: save it with 8 or 16 bits."
                )
            return np.array(image.convert("L" if channels == 1 else "RGB"))
    except FileNotFoundError:
        raise GncpriorError(f"There is no image {path}.") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise GncpriorError(
            f"Cannot read {path} as an image: it is damaged or of an unknown kind."
        ) from error
