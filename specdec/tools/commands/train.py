"""`specdec train`: the commands of `specdec.tools.train.cli`."""

from specdec.tools.train.cli import app

__all__ = ["app"]
