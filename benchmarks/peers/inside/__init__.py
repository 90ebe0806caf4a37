"""Scripts that run as files inside a peer's own environment; they import nothing of this repository."""
