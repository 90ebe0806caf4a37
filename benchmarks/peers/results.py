"""`Results`: measurements of a run, on disk as they come, and the medians and ratios of them."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.peers.measure import Measurement


class Results:
    """A list of measurements in a file of JSON lines; a run in pieces appends to one file."""

    def __init__(self, file: Path, append: bool) -> None:
        self._file = file
        self._measurements: list[Measurement] = []
        if append and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                fields = json.loads(line)
                self._measurements.append(Measurement(**{**fields, "gaps": tuple(fields["gaps"])}))
        else:
            file.unlink(missing_ok=True)

    def add(self, measurement: Measurement) -> None:
        self._measurements.append(measurement)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(measurement)) + "\n")

    def next_round(self) -> int:
        return 1 + max((each.round for each in self._measurements), default=-1)

    def contestants(self) -> list[str]:
        """Those with any figure, in the order in which they came."""
        return list(dict.fromkeys(each.contestant for each in self._measurements))

    def rounds(self, contestant: str, what: str) -> int:
        return len(self._values(contestant, what))

    def median(self, contestant: str, what: str) -> float | None:
        """Over the rounds; none where nothing was measured."""
        values = self._values(contestant, what)
        return statistics.median(values) if values else None

    def gaps(self, contestant: str, what: str) -> list[float]:
        """Seconds between tokens in steady decode, of all rounds, in ascending order."""
        found = (each for each in self._measurements if (each.contestant, each.what) == (contestant, what))
        return sorted(gap for measurement in found for gap in measurement.gaps)

    def _values(self, contestant: str, what: str) -> list[float]:
        return [each.value for each in self._measurements if (each.contestant, each.what) == (contestant, what)]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of `ordered`, which has to hold some, do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
