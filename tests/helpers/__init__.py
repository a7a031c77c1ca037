"""Code shared by tests; nothing here is shipped."""
