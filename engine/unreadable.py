"""`why_unreadable`: the end of a sentence on a file that cannot be read. Used where a setting names the file."""


def why_unreadable(error: OSError | ValueError) -> str:
    """What went wrong, without the number and the path that an `OSError` puts around it."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
