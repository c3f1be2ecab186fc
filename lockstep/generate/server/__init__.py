"""The HTTP server: OpenAI's and Anthropic's routes over the engine, tokens in and out, metrics, live weight updates."""

from lockstep.generate.server.app import create_app
from lockstep.generate.server.engine_loop import EngineLoop
from lockstep.generate.server.serve import build_service, serve
from lockstep.generate.server.service import Service

__all__ = ["EngineLoop", "Service", "build_service", "create_app", "serve"]
