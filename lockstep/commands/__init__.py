"""Commands that are more than one call into the library, option parsing, and the summary at the end of a run."""
