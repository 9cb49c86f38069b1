"""SLOMax: whether and when.

Decides whether a request is let in (tenant, permission, quotas, saturation) and, of everything that is held, what
goes next: as many as can be on time, with floors for every class, shares between classes that the measured goodput
moves, and tenants by what they have really used. It refuses to know instances and prefixes: how much room an instance
has is TokenPilot's word.

Hears: request.received, admission.*, placement.*, room.offered, capacity.reported, outcome.finished, gateway.leased,
goodput.measured.
Says: admission.decided, admission.lent, admission.shared, admission.owned, placement.released, placement.refused,
room.declined, and placement.requested in FleetMind's stead when that stays silent (marked `fallback`).
Offices: `admission:<entry>` for every entry site, `release:<site>` for every site with instances.
"""
