"""For each family of Triton kernels: the torch reference and the cases that the start, kaon doctor and tests
compare it on.
"""
