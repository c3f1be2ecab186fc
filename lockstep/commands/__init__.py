"""Commands that are more than one call into the library, how options are read, and what runs print at their end."""
