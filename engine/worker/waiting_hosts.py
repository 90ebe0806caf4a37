"""`WaitingHosts`: hosts that have said hello and cannot join yet. Owned by `HostRouter`."""

from collections.abc import Iterator, Mapping

from engine.worker.host_messages import Hello


class WaitingHosts:
    """What they said, by the names of their connections. They may have gone meanwhile."""

    def __init__(self) -> None:
        self._for_ground: dict[bytes, Hello] = {}
        self._for_place: dict[bytes, Hello] = {}

    def __iter__(self) -> Iterator[bytes]:
        """All names."""
        return iter([*self._for_ground, *self._for_place])

    def wait_for_ground(self, name: bytes, hello: Hello) -> None:
        """Until the first host knows what others must have in common with it."""
        self._for_ground[name] = hello

    def wait_for_place(self, name: bytes, hello: Hello) -> None:
        """Until it is known whether the host that has joined under that number is there."""
        self._for_place[name] = hello

    def take_for_ground(self) -> Mapping[bytes, Hello]:
        """Those that wait for the ground; they wait no more."""
        taken, self._for_ground = self._for_ground, {}
        return taken

    def take_for_place(self, node: int | None) -> Mapping[bytes, Hello]:
        """Those that wait for the place of that number; they wait no more."""
        taken = {name: hello for name, hello in self._for_place.items() if hello.node == node}
        for name in taken:
            del self._for_place[name]
        return taken
