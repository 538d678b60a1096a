"""Grammar libraries behind the interfaces of `specdec.core.grammar.matcher`, and the bytes of tokens."""
