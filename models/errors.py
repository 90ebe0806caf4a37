"""Errors that any reader of a checkpoint raises."""


class CheckpointError(ValueError):
    """A checkpoint cannot be served; the message is one sentence for a person."""
