"""`python -m server.healthcheck [/readyz]`: asks the server of this container whether it lives, or is ready.

Exit code 0 if so, 1 if not. Reads port and certificate from the `KAON_*` variables that the server reads; a server
that is given them as flags, or that asks clients for certificates, needs a health check of its own. A host whose
`KAON_NODE_RANK` is not 0 serves no HTTP and counts as well: it ends by itself when it cannot go on.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request

_SECONDS = 5


def main() -> int:
    """The exit code."""
    if os.environ.get("KAON_NODE_RANK", "0") != "0":
        return 0
    path = sys.argv[1] if sys.argv[1:] else "/livez"
    port = os.environ.get("KAON_PORT", "8000")
    has_tls = bool(os.environ.get("KAON_SSL_CERTFILE"))
    # The certificate's name is not that of the loopback interface, and nobody is in between.
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
