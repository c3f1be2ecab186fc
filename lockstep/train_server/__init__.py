"""The training API: the `tinker` client and its cookbook train adapters of one model here, and sample from them."""

from lockstep.train_server.serve import build_service, serve

__all__ = ["build_service", "serve"]
