"""FleetMind's long cycle as arithmetic: demand forecast, what a replica can do, replica targets, reservations.

Decides how many replicas of which model version each site should run, and which promises of capacity can be kept. All
of it is values in, values out: it refuses to know messages, offices, engines and clocks, which `fleetmind.longcycle`
brings.
"""
