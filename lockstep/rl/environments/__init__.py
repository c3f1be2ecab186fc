"""Environments: their protocol, how they are loaded, ready tasks, and adapters of other packages' environments."""
