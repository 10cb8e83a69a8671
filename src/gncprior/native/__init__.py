"""C++ kernels with a plain C interface, and the module that loads them."""
