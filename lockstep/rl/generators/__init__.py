"""Who samples: the ranks that train, or a pool of processes and servers elsewhere."""
