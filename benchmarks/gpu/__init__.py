"""What a GPU gives, next to what it could: kernels, steps and throughput; `python -m benchmarks.gpu`."""
