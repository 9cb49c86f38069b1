"""The site agent: what is ready at a site, and how loaded. One per site.

Decides whether each declared instance is ready, with a typed reason when it is not; whether it was restarted; what it
says about its load, in one form for every engine and version; which of them run, drain and stop so that a plan of
FleetMind's comes true, where the site has an actuator. It refuses to know requests, tenants and other sites'
engines: of those it measures only how far away they are.

Hears: the engines' HTTP endpoints (health, metrics, models, version), plan.issued of its site.
Says: capacity.reported, capacity.probed, plan.applied.
"""
