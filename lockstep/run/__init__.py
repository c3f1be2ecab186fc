"""What every run has around its steps: the loop, the session, and how signals end it."""
