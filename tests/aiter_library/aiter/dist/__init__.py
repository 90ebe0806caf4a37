"""As the library is laid out."""
