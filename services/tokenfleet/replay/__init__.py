"""Replay: drives an OpenAI-compatible URL with a trace, open-loop, and says how many promises were kept.

Decides when each request is sent, what its prompt is and how the answers are counted. Knows nothing of the control
plane behind the URL: all that it learns it reads from HTTP answers, so the same report judges any fleet.
"""
