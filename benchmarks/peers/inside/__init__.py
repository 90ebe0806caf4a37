"""Scripts that run inside a peer's own environment, where Kaon is not installed: they import nothing of this tree."""
