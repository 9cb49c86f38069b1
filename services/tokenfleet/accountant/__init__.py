"""The accountant: what came of every request.

Decides: whether a request complied, and if not, which promise was missed and what was wasted; which open requests have
lost their gateway; the goodput of every class, tenant, model and site over sliding windows.
Hears: `outcome.finished` (a durable consumer shared by all replicas writes the ledger; an ordered reader feeds the
windows), `outcome.started`, `request.received`, `gateway.leased`.
Says: `goodput.measured`; `outcome.finished` with `owner_lost` for a request whose gateway is gone. Both only by the
replica that holds the office `goodput`. Rows go to Postgres, where (request_id, attempt) is unique: exactly once lives
there and nowhere else.
"""
