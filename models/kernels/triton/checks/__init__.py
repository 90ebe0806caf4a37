"""Small problems of a model's own sizes, which its kernels compute before it is served, and which torch checks."""
