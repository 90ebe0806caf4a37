"""Training data, training and evaluation of the embedded demo model."""
