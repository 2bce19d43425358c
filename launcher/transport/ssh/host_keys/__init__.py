"""Host keys: which are known, certified, revoked, and accepted."""
