"""Settings of the Python process while it serves: the event loop and the thread that steps share one interpreter."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds for which the event loop may keep Python from the thread that steps; 0.005 is usual. A forward on a CPU lets
# others have Python at every op, so that short intervals cost more than they bring.
SWITCH_INTERVAL = {"cuda": 0.00001, "cpu": 0.0002}


@contextmanager
def shared_fairly(device_type: str) -> Iterator[None]:
    """Let threads take turns after `SWITCH_INTERVAL`, and have the garbage collector skip objects that exist: going
    through those of a model and its libraries stops all threads for a quarter of a second."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL[device_type])
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)
