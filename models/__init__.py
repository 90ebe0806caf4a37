"""Model code: configuration, registry, loader, layers, attention backends, architectures. Imports no other room."""
