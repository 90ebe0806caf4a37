"""The parts of `/v1/responses` that chats do not have: tools, conversion, events, storage and background runs."""
