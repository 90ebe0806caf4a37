"""Development tools that are not in the wheel."""
