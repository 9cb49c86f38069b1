"""The fleet on one machine: embedded servers from wheels, a process supervisor, and what `tokenfleet up` starts.

Decides which processes run here, on which ports and in which order; knows nothing of what the services decide.
"""
