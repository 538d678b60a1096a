"""The paged KV cache: its pool on the device, who holds which pages, and what is kept for later prompts."""
