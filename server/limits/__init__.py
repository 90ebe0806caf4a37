"""Who may use what: owners and their keys, what each uses, and the limits and turns by which they share the server."""
