"""Operators in C for the CPU: the sources, their ctypes mirrors, and the functions over tensors that call them."""
