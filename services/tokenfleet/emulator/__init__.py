"""Inference engines without a GPU: `engine_model` behind vLLM 0.32's HTTP API, on the real clock.

Decides nothing of its own: timing and batching are the engine model's, faults come on command over an admin port.
Hears HTTP requests; says what a vLLM would say, shapes of responses, errors and metrics included. Refuses to know the
rest of TokenFleet: to a gateway or a site agent an emulated instance is just another engine.
"""

from tokenfleet.emulator.service import Emulator, run

__all__ = ["Emulator", "run"]
