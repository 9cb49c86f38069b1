"""The simulator: the very same cores as the live services, and modelled engines, on a virtual clock.

Decides when a message arrives and when an engine's step ends; everything else is decided by the cores that it runs.
Hears a scenario (a fleet, arrivals, faults and their times) and a policy; says what came of every offered request, as
the same records and reports as `tokenfleet replay`. Refuses to know the wall clock, the network and the disk: only
`scenario.load` reads files, only `experiment` starts processes.
"""
