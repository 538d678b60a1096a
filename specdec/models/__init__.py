"""Models: the attach layer for live targets, draft heads, and the loader of checkpoint layouts."""
