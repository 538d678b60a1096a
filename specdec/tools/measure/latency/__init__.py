"""Latency that users see through `engine.generate`: to the first token, of a token, of a round, and of attaching."""
