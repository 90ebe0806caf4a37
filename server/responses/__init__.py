"""What `/v1/responses` adds to a chat: tools, conversion, events, stored responses and background runs."""
