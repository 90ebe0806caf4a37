"""`DelayedDevice`: a CPU that is as late as a GPU may be, so that mistakes in the order of operations fail tests."""

import torch

from engine.runner.device import Downloads, Event, HostDevice
from engine.sampling.sampler import LaunchedTokens, SampledTokens

GARBAGE = 0x7B


class DelayedDevice(HostDevice):
    """Copies to pinned memory arrive when an event after them is waited for; until then the memory is garbage.

    The source of a copy from pinned memory must be unchanged at that time, as the device may not have read it before.
    """

    is_host = False

    def __init__(self) -> None:
        self._pinned: dict[int, torch.Tensor] = {}
        """By address; stored, so that the addresses are not reused."""
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
        """Pending copies: source or target in pinned memory, the copied tensor, and the direction."""
        self._num_done = 0

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """See `Device`."""
        memory = torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)
        self._pinned[memory.untyped_storage().data_ptr()] = memory
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device`."""
        to_host = target.untyped_storage().data_ptr() in self._pinned
        assert to_host or source.untyped_storage().data_ptr() in self._pinned, "a copy that would hold the host up"
        if to_host:
            self._waiting.append((target, source.clone(), True))
            target.view(torch.uint8).fill_(GARBAGE)
        else:
            self._waiting.append((source, source.clone(), False))
            target.copy_(source)

    def record(self) -> Event:
        """See `Device`."""
        return _Later(self, self._num_done + len(self._waiting))

    def reach(self, place: int) -> None:
        """Complete all work of the device up to this point."""
        while self._num_done < place:
            pinned, content, to_host = self._waiting.pop(0)
            if to_host:
                with torch.inference_mode():
                    pinned.copy_(content)
            assert torch.equal(pinned, content), "pinned memory was written before the device had read it"
            self._num_done += 1

    def has_reached(self, place: int) -> bool:
        """Whether the device has certainly completed the work."""
        return self._num_done >= place


class _Later:
    def __init__(self, device: DelayedDevice, place: int) -> None:
        self._device, self._place = device, place

    def query(self) -> bool:
        """See `Event`."""
        return self._device.has_reached(self._place)

    def synchronize(self) -> None:
        """See `Event`."""
        self._device.reach(self._place)


def read(launched: LaunchedTokens, downloads: Downloads) -> SampledTokens:
    """Read tokens by copies that are begun before they are waited for, as the launcher does."""
    words = (launched.candidates.words, launched.logprobs)
    begun = [downloads.begin(each) for each in words if each is not None]
    return launched.read(*(download.wait() for download in begun))
