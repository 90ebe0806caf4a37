"""What the GPU gives, beside what it could: `python -m benchmarks.gpu`. One file a part; `parts` lists them."""
