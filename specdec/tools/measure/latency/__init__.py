"""Latency that users see through `engine.generate`: to the first token, per token, per round, and of attaching."""
