"""What each request passes before its route: plain ASGI, because a wrapper around streams costs every chunk."""
