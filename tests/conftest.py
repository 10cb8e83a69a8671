"""What several files of tests share."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """Where images are tiny: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
