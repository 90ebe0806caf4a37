"""What `/v1/responses` keeps and converts: the store, background runs, and the way to a chat. Used by its route."""
