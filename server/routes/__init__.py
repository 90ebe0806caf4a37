"""The endpoints: one module per endpoint family, listed in `server.endpoints`."""
