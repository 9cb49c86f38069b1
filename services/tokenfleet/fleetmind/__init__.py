"""FleetMind: which site, and how many replicas where.

Decides, for every admitted request, the site whose TokenPilot is asked: of those that may have it and can serve it,
the entry's home sites in order while they are below their load ceiling, else the nearest below its own. It asks the
next one when a TokenPilot stays silent, asks again elsewhere when an instance failed before the first token, and
moves held requests to sites with clear room. It refuses to know instances' queues and prefixes (TokenPilot's) and
who is let in or goes next (SLOMax's).

Once a minute it decides how many replicas of which model version each site should run (`longcycle`), and at any time
who is promised what (`promises`). How a replica is started is the site agents' affair.

Hears: admission.decided, admission.owned, capacity.*, placement.*, outcome.finished, gateway.leased, plan.applied,
reservation.requested, reservation.withdrawn.
Says: placement.requested, placement.withdrawn, placement.refused, placement.owned, plan.issued, reservation.granted,
reservation.refused, reservation.revoked, reservation.owned.
Offices: `model:<model>` for every model, `plan:fleet`.
"""
