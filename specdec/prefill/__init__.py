"""Prompts into the caches of target and draft: the program and its graphs."""
