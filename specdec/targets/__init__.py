"""Live `transformers` models: which can be attached, and how they run as targets and as standalone drafts."""
