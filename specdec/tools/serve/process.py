"""Interpreter settings while serving: the event loop and the stepping thread share the GIL."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds for which the event loop may hold the GIL while the stepping thread waits; Python's default is 0.005. A CPU
# forward releases the GIL at every op, so very short intervals cost more than they gain.
SWITCH_INTERVAL = {"cuda": 0.00001, "cpu": 0.0002}


@contextmanager
def shared_fairly(device_type: str) -> Iterator[None]:
    """Set `SWITCH_INTERVAL`, and exempt existing objects from garbage collection: traversing those of a model and its
    libraries stops all threads for a quarter of a second."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL[device_type])
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)
