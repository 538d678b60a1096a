"""An HTTP server in the form of OpenAI's API; the optional packages it needs are imported only here."""
