"""`check_limits`: what this server's configuration lets a request ask for. Called by the routes."""

from server.errors import BadRequest
from server.frontend import Frontend
from server.protocol.common import SamplingFields

MAX_SEQUENCES = 2048
"""Most sequences one request may fan out to."""


def check_limits(request: SamplingFields, prompts: int, frontend: Frontend) -> None:
    """Raise `BadRequest` for what this server's configuration does not allow."""
    limits = frontend.config.server_config
    if request.n > limits.max_n:
        raise BadRequest(f"n is {request.n}; it must be at most {limits.max_n} (max_n)", param="n")
    if len(request.stop) > limits.max_stop_strings:
        raise BadRequest(
            f"stop holds {len(request.stop)} strings; it may hold {limits.max_stop_strings} (max_stop_strings)",
            param="stop",
        )
    each = request.sequences_per_prompt
    if each > limits.max_n:
        raise BadRequest(f"best_of is {each}; it must be at most {limits.max_n} (max_n)", param="best_of")
    if prompts * each > MAX_SEQUENCES:
        raise BadRequest(
            f"prompt holds {prompts} prompts of {each} choices each; a request may have at most "
            f"{MAX_SEQUENCES} choices in all",
            param="prompt",
        )
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options is set, but only a request with stream true has any", param="stream_options")
