"""Model families, one file each, the registry that names them, and the configuration they are built from."""
