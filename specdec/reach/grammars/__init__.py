"""Libraries of matchers behind the contracts of `specdec.core.grammar.matcher`, and the bytes of tokens."""
