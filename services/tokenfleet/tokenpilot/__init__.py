"""TokenPilot: on which instance, and how much room each instance has. One per site.

Decides, for every request that was sent to its site, which instance of the exact model version serves it; books the
work at that moment and gives it back exactly once. When no instance worth using has room it holds the request, offers
room as it appears and fills what it offers only when SLOMax stays silent. It refuses to know who should go first
(SLOMax's word), which other sites there are (FleetMind's) and what engines are made of (the agents').

Hears: capacity.reported, placement.* of its site, room.declined, outcome.started, outcome.finished, gateway.leased.
Says: placement.assigned, placement.held, placement.owned, room.offered, and placement.refused for a hold whose
patience ran out while SLOMax was silent.
Offices: `pool:<site>:<model>:<version>` for every model version that the site declares instances of.
"""
