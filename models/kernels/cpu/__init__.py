"""Operators for the CPU in C, and how they are called."""
