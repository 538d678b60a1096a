"""An OpenAI-compatible HTTP server; its optional packages are imported only here."""
