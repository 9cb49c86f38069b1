"""The gateway: where clients enter, and the only part that talks to engines for them.

Decides: who a client is (by its key alone), whether a request is well formed and within the key's entitlements, when
one attempt has failed, and, only where the services that should decide stay silent, a conservative admission and the
next allowed site. It dispatches each attempt once, to the instance that a TokenPilot booked.

Hears: `placement.assigned`, `.held`, `.refused` of its own requests, and `capacity.reported`.

Says: `request.received`, `placement.declined`, `outcome.started`, `outcome.finished`, `gateway.leased`; as fallbacks
`admission.decided` and `placement.requested`.

Refuses to know how instances, sites and admissions are chosen.

Idempotency: a client that gives up has its work cancelled on the engine at once, so that an SDK's retry does not run
beside the first try. With an `Idempotency-Key` it goes on instead, and a repeat gets its answer (`idempotency`).
"""
