"""Memory that is used again."""

import torch

from gncprior.buffers import Buffers


def test_memory_is_kept_grown_and_never_shared_between_names():
    buffers, like = Buffers(), torch.zeros(1)
    a = buffers.get("a", (2, 3), like)
    assert a.shape == (2, 3)
    assert a.is_contiguous()
    assert buffers.get("a", (3, 2), like).data_ptr() == a.data_ptr()
    assert buffers.get("a", (1,), like).data_ptr() == a.data_ptr()  # smaller: the same memory
    assert buffers.get("b", (2, 3), like).data_ptr() != a.data_ptr()
    larger = buffers.get("a", (7, 7), like)
    assert larger.shape == (7, 7)
    assert buffers.get("a", (2, 3), like).data_ptr() == larger.data_ptr()
    assert Buffers().get("a", (7, 7), like).data_ptr() != larger.data_ptr()


def test_type_follows_the_example():
    buffers = Buffers()
    single = buffers.get("a", (4,), torch.zeros(1))
    double = buffers.get("a", (4,), torch.zeros(1, dtype=torch.float64))
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)


def test_no_pixels_need_no_memory():
    assert Buffers().get("a", (0, 3), torch.zeros(1)).shape == (0, 3)
