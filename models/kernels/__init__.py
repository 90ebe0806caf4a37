"""Operators in plain C for the CPU, compiled where there is a compiler; each has a torch reference beside it."""
