"""What scores rollouts: the policy loss, the parity check, routes, value head, reference, teacher, reward model."""
