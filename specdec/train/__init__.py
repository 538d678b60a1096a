"""Trains draft heads: target-regenerated data, training-time test, export in the official EAGLE-3 layout."""
