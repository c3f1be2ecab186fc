"""Commands that are more than one call into the library."""
