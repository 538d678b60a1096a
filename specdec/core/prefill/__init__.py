"""Prefill of prompts into the KV caches of target and draft: the program and its graphs."""
