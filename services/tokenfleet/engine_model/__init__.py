"""The pure model of one inference engine: continuous batching, chunked prefill, KV blocks with prefix reuse.

Decides which sequences run in a step, how long the step takes and which KV blocks are kept for reuse. Hears requests,
cancellations and the time; says which sequences gained a token. Refuses to know clocks, sockets, text and randomness:
the emulator drives it on the real clock, a simulator on a virtual one, with the same result.
"""

from tokenfleet.engine_model.blocks import block_hashes
from tokenfleet.engine_model.engine import (
    Engine,
    EngineError,
    EngineStats,
    Phase,
    Sequence,
    SequenceTooLongError,
    StepPlan,
)
from tokenfleet.engine_model.profiles import PROFILES, Profile, UnknownProfileError, cold_start_s, profile

__all__ = [
    "PROFILES",
    "Engine",
    "EngineError",
    "EngineStats",
    "Phase",
    "Profile",
    "Sequence",
    "SequenceTooLongError",
    "StepPlan",
    "UnknownProfileError",
    "block_hashes",
    "cold_start_s",
    "profile",
]
