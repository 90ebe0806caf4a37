"""Model families, one file each, their registry, and the configuration from which they are built."""
