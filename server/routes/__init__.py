"""The endpoints: one module an endpoint family, listed in `server.app`."""
