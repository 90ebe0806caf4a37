"""Errors that other packages catch, and messages of foreign errors. Imports no torch."""


class CheckpointError(ValueError):
    """A checkpoint cannot be served. The message is one sentence for the user."""


class ReplicaLeft(RuntimeError):
    """A replica has left the group, so that an exchange with it cannot complete."""

    def __init__(self, replica: int) -> None:
        super().__init__(f"replica {replica} has left the step that all compute together")
        self.replica = replica


class CollectiveAborted(RuntimeError):
    """Another rank has left the step in which this one waits for it."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message without a full stop; the name of its type where it has no message."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
