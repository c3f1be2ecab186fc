"""Environments: their protocol, loading, built-in tasks, and adapters for other packages' environments."""
