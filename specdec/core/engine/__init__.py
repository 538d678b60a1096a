"""Requests from the caller to the device and back: checked, scheduled, packed, stepped, handed out."""
