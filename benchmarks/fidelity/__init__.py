"""How far the simulator can be believed: its engine model against a real engine, its runs against a live fleet.

`fit` measures an OpenAI-compatible server and fits the engine model's constants to it; `rank` runs policies on real
engines behind real services and in the simulation; `parity` runs one scenario live, with emulators, and simulated.
"""
