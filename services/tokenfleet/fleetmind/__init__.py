"""FleetMind: which site.

Decides, for every admitted request, the site whose TokenPilot is asked: of those that may have it and can serve it,
the entry's home sites in order while they are below their load ceiling, else the nearest below its own. It asks the
next one when a TokenPilot stays silent, asks again elsewhere when an instance failed before the first token, and
moves held requests to sites with clear room. It refuses to know instances' queues and prefixes (TokenPilot's) and
who is let in or goes next (SLOMax's).

Hears: admission.decided, admission.owned, capacity.*, placement.*, outcome.finished, gateway.leased.
Says: placement.requested, placement.withdrawn, placement.refused, placement.owned.
Offices: `model:<model>` for every model.
"""
