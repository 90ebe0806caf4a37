"""Errors that other rooms catch, and what is said of those of others. No torch here."""


class CheckpointError(ValueError):
    """A checkpoint cannot be served; the message is one sentence for a person."""


class ReplicaLeft(RuntimeError):
    """A replica comes to no further exchange, in which this one would wait for it."""

    def __init__(self, replica: int) -> None:
        super().__init__(f"replica {replica} has left the step that all compute together")
        self.replica = replica


class CollectiveAborted(RuntimeError):
    """Another rank has left the step in which this one waited for it."""


def first_line(error: BaseException) -> str:
    """Of its message, without full stops at its end; its type's name where it says nothing."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
