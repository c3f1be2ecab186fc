"""What the policy sampled: its prompts, records, prefetching, packing into micro-batches, and metrics."""
