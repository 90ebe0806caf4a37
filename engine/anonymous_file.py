"""`anonymous_file`: memory that processes share by inheriting its descriptor. No torch here."""

import os


def anonymous_file(name: str, num_bytes: int) -> int:
    """A descriptor of a new file of zeros, which is the caller's to close.

    No directory names it, and nothing is left of it when its processes are gone; `name` is for people who look at
    what a process has open.
    """
    descriptor = os.memfd_create(name)
    os.truncate(descriptor, num_bytes)
    return descriptor
