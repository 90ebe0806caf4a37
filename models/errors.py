"""Errors that other rooms catch. No torch here."""


class CheckpointError(ValueError):
    """A checkpoint cannot be served; the message is one sentence for a person."""


class ReplicaLeft(RuntimeError):
    """A replica comes to no further exchange, in which this one would wait for it."""

    def __init__(self, replica: int) -> None:
        super().__init__(f"replica {replica} has left the step that all compute together")
        self.replica = replica
