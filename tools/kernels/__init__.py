"""Every form in which a kernel is compiled ahead of time: one module for each module of kernels."""
