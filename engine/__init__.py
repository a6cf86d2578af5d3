"""The engine of both roles, and the offline door: ``from engine import Engine; Engine(path).generate(prompts, params)``."""

from engine.completion import Completion, Piece
from engine.config import EngineConfig
from engine.engine import Engine
from protocol.sampling import SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "Piece", "SamplingParams"]
