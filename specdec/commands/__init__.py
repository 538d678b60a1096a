"""The `specdec` command."""
