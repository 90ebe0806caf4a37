"""CPU operators in C: the sources, the ctypes mirrors of their structures, and the tensor functions that call them."""
