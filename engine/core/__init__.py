"""The engine-core process: scheduler, busy loop, sockets, start-up. Torch only inside the start-up's functions."""
