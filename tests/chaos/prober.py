"""Probes a server until standard input ends, each time on a new connection; then prints the times as JSON.

A process of its own: in the one of an attack, which is busy with its own answers, probes would seem to take longer.
"""

import http.client
import itertools
import json
import select
import sys
import time

_PATHS = ("/livez", "/readyz", "/metrics")
_PAUSE_SECONDS, _TIMEOUT_SECONDS = 0.05, 120


def main() -> None:
    port = int(sys.argv[1])
    seconds, closed = list[float](), 0
    for path in itertools.cycle(_PATHS):
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
            seconds.append(time.monotonic() - began)
        except (ConnectionResetError, BrokenPipeError):
            closed += 1
        finally:
            connection.close()
        is_over = bool(select.select([sys.stdin], [], [], _PAUSE_SECONDS)[0])
        if is_over and seconds:
            break
    json.dump({"seconds": seconds, "closed": closed}, sys.stdout)


if __name__ == "__main__":
    main()
