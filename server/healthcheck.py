"""`python -m server.healthcheck [/readyz]`: checks whether the server of this container is live, or ready.

The exit code is 0 if it is, 1 if not. Port and certificate come from the `KAON_*` variables that the server reads. A
server that gets them as flags, or that requires client certificates, needs another health check. A host whose
`KAON_NODE_RANK` is not 0 serves no HTTP and is reported as healthy: its process exits when it fails.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request

_SECONDS = 5


def main() -> int:
    """Run the check. Returns the exit code."""
    if os.environ.get("KAON_NODE_RANK", "0") != "0":
        return 0
    path = sys.argv[1] if sys.argv[1:] else "/livez"
    port = os.environ.get("KAON_PORT", "8000")
    has_tls = bool(os.environ.get("KAON_SSL_CERTFILE"))
    # The certificate does not name the loopback address. It is not checked, since the traffic stays on this host.
    context = ssl._create_unverified_context() if has_tls else None
    url = f"{'https' if has_tls else 'http'}://127.0.0.1:{port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS, context=context):
            return 0
    except (urllib.error.URLError, OSError) as error:
        sys.stderr.write(f"{url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
