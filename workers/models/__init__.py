"""Model definitions: one decoder for all families, and the shapes it is built from."""
