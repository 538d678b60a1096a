"""Grammars: what a text may be, and the masks of a round's nodes. Knows matchers by protocol alone."""
