"""Live `transformers` models: checks which can be attached, and runs them as targets and as standalone drafts."""
