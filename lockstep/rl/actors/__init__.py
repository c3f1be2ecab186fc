"""Trainer and generators on several ranks: who samples what, and how new weights reach the generators."""
