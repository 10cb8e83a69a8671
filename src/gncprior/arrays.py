"""Arrays of users ↔ the float tensors of the priors.

A picture is whatever people have: a numpy array or a torch tensor, grey (…, H, W) or with a channel
axis, of bytes, 16-bit integers or floats.  The scale is the same for all: 0 … 255 and 0 … 65535 become
[0, 1] by the range of the type, floats by ``data_range``; on the way back integers are rounded and
clipped to their type.  Nothing else is done to the values.

Nothing is copied as a whole: :class:`Pictures` is a view, and only the part that is worked on becomes
a float tensor, so that a large picture of bytes never stands in memory as one of floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gncprior.errors import GncpriorError

INTEGERS = {"uint8": 255.0, "uint16": 65535.0}
FLOATS = {"float16", "float32", "float64"}

Region = tuple[slice, slice]
WHOLE: Region = (slice(None), slice(None))


def dtype_name(array: Any) -> str:
    """uint8, float32 …, the same word for numpy and torch."""
    return str(array.dtype).removeprefix("torch.") if _is_torch(array) else array.dtype.name


def range_of(array: Any, data_range: float | None) -> float:
    """What stands for 1: the range of an integer type, or ``data_range`` (1 unless given)."""
    name = dtype_name(array)
    if name not in INTEGERS and name not in FLOATS:
        known = ", ".join([*INTEGERS, *sorted(FLOATS)])
        raise GncpriorError(f"Pictures of type {name} have no known range: convert to {known}.")
    if data_range is None:
        return INTEGERS.get(name, 1.0)
    if not 0 < data_range < math.inf:
        raise GncpriorError(f"The data range must be a positive number, not {data_range}.")
    return float(data_range)


class Pictures:
    """One picture or a stack as a view (…, C, H, W), with its scale; iterates over (C, H, W).

    With a channel axis of 2 or 4 entries the last one is alpha: ``colours`` leaves it out.
    """

    def __init__(
        self, array: Any, channel_axis: int | None = None, data_range: float | None = None
    ) -> None:
        if not _is_torch(array) and not isinstance(array, np.ndarray):
            raise GncpriorError(
                f"A picture is a numpy array or a torch tensor, not {type(array).__name__}."
            )
        self.array = array
        self.scale = range_of(array, data_range)
        needed = 2 if channel_axis is None else 3
        if array.ndim < needed or 0 in array.shape:
            raise GncpriorError(
                f"A picture has {needed} axes or more and at least one pixel, "
                f"not the shape {tuple(array.shape)}."
            )
        self.view = channels_first(array, channel_axis)
        channels = self.view.shape[-3]
        self.colours = channels - 1 if channels in (2, 4) else channels
        self.size: tuple[int, int] = tuple(self.view.shape[-2:])

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """The index of every picture of the stack; one empty index for a single picture."""
        return iter(np.ndindex(*self.view.shape[:-3]))

    def hues(self, index: tuple[int, ...]) -> int:
        """The number of colours, or 1 where all are the same everywhere: a grey picture stored as colour."""
        first, *others = self.view[(*index, slice(self.colours))]
        same = torch.equal if _is_torch(self.view) else np.array_equal
        rows = 256  # so that one glance tells in most pictures
        for top in range(0, self.size[0], rows):
            band = slice(top, top + rows)
            if not all(same(first[band], other[band]) for other in others):
                return self.colours
        return 1

    def read(self, index: tuple[int, ...], region: Region = WHOLE) -> Tensor:
        """A part of a picture, on the scale [0, 1], as new float32 (colours, h, w)."""
        part = self.view[(*index, slice(self.colours), *region)]
        if _is_torch(part):
            return part.detach().to(torch.float32, copy=True) / self.scale
        with np.errstate(over="ignore"):  # what float32 cannot hold is found not to be finite
            return torch.from_numpy(np.array(part, np.float32, order="C")).div_(self.scale)

    def write(
        self, index: tuple[int, ...], region: Region, values: Tensor, where: Tensor | None = None
    ) -> None:
        """The opposite of :meth:`read`, into the array itself; other pixels than ``where`` stay as they are."""
        values = values * self.scale
        if (name := dtype_name(self.array)) in INTEGERS:
            values = values.round_().clamp_(0, INTEGERS[name])
        place = (*index, slice(self.colours), *region)
        if _is_torch(self.array):
            new = values.to(self.array)
            # integers survive the way to float32 and back; and torch knows no `where` for uint16
            if where is not None and new.is_floating_point():
                new = torch.where(where.to(new.device), new, self.view[place])
            self.view[place] = new
        else:
            with np.errstate(over="ignore"):
                changed = values.numpy().astype(self.array.dtype)
            if where is not None:
                changed = np.where(where.numpy(), changed, self.view[place])
            self.view[place] = changed

    def check_finite(
        self, index: tuple[int, ...], region: Region, values: Tensor, hidden: Tensor | None = None
    ) -> None:
        """Name the first pixel that is NaN or infinite and not hidden by a mask."""
        bad = ~values.isfinite()
        if hidden is not None:
            bad &= ~hidden
        if not bool(bad.any()):
            return
        channel, row, column = bad.nonzero()[0].tolist()
        value = float(values[channel, row, column])
        row, column = row + (region[0].start or 0), column + (region[1].start or 0)
        place = f"row {row}, column {column}"
        if self.colours > 1:
            place += f", channel {channel}"
        if index:
            place += f" of picture {', '.join(map(str, index))}"
        raise GncpriorError(
            f"The pixel at {place} is {value}: replace it, or inpaint it with a mask."
        )


def channels_first(array: Any, channel_axis: int | None) -> Any:
    """A view (…, C, H, W)."""
    if channel_axis is None:
        return array[..., None, :, :]
    if not -array.ndim <= channel_axis < array.ndim:
        raise GncpriorError(
            f"There is no channel axis {channel_axis} in an array of {array.ndim} axes."
        )
    rest = [k for k in range(array.ndim) if k != channel_axis % array.ndim]
    order = [*rest[:-2], channel_axis % array.ndim, *rest[-2:]]
    return array.permute(order) if _is_torch(array) else array.transpose(order)


def masks_like(mask: Any, pictures: Pictures, channel_axis: int | None) -> Any:
    """A boolean mask as a numpy view of the shape of ``pictures.view``; True is unknown.

    It may have the picture's shape, that without the channel axis, or be one (H, W) for all.
    """
    mask = mask.detach().cpu().numpy() if _is_torch(mask) else np.asarray(mask)
    if mask.dtype != np.bool_:
        raise GncpriorError(f"A mask must be boolean, True where unknown, not {mask.dtype}.")
    shape = tuple(pictures.view.shape)
    if mask.shape == tuple(pictures.array.shape):
        return channels_first(mask, channel_axis)
    if mask.shape in (shape[:-3] + shape[-2:], shape[-2:]):
        return np.broadcast_to(mask[..., None, :, :], shape)
    raise GncpriorError(
        f"The mask of shape {mask.shape} does not fit the picture of shape "
        f"{tuple(pictures.array.shape)}: give it the height and width of the picture."
    )


def copy_of(array: Any) -> Any:
    """New memory of the same kind, type and content."""
    return array.detach().clone() if _is_torch(array) else np.array(array)


def _is_torch(array: Any) -> bool:
    return isinstance(array, Tensor)
