"""A GPU's kernels, steps and throughput, compared with the device's limits; `python -m benchmarks.gpu`."""
