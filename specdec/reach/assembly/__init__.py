"""Puts an engine together: target, draft, backends, memory."""
