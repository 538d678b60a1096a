"""One round on the device: its program, its state by row, its graphs."""
