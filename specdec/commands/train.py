"""`specdec train`: the commands of `specdec.train.cli`."""

from specdec.train.cli import app

__all__ = ["app"]
