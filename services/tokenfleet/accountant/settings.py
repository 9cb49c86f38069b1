"""Knobs of the accountant, with units. What an operator sets is in the fleet file (`fleet.windows_s`)."""

import msgspec


class AccountantSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How it batches, waits and forgets."""

    #: windows end at multiples of this, and are said as often, ms
    step_ms: int = 2_000
    #: how often it looks for gateways that are gone, ms
    tick_ms: float = 500.0
    #: an open request that its gateway's leases omit is given this long for its outcome to arrive, ms
    omitted_grace_ms: float = 3_000.0
    #: a gateway's clock is believed if its leases show it no further off than this, ms
    clock_tolerance_ms: float = 1_000.0
    #: how long ended requests and counted attempts are remembered against repeats, ms
    remembered_ms: float = 600_000.0
    #: and how many of each at most: about 200 bytes apiece, so that a busy fleet cannot fill the memory
    remembered_max: int = 250_000
    #: rows in one transaction at most: a full batch doubles what the next may hold, one that is not full halves it
    batch_rows_min: int = 250
    batch_rows_max: int = 2_000
    #: how long a batch waits for company after its first event, s: a transaction costs as much as fifty of its rows,
    #: and nobody reads the ledger within the second
    batch_wait_s: float = 0.5
    #: unacknowledged events that all replicas together hold at most
    ack_pending_max: int = 16_000
    #: an event not acknowledged in this time is delivered again, s: as long as rows in a killed replica wait. Above
    #: `statement_timeout_ms`; too early a repeat costs a lookup in the ledger, nothing else
    ack_wait_s: float = 8.0
    #: pauses while Postgres does not take rows, s
    retry_min_s: float = 0.25
    retry_max_s: float = 5.0
    #: days of the ledger whose partitions are made before they come, how often that is looked after, and after a
    #: failure, s
    days_ahead: int = 3
    days_check_s: float = 600.0
    days_retry_s: float = 30.0
    #: connections of one replica
    pool_size: int = 4
    statement_timeout_ms: int = 5_000
    lock_timeout_ms: int = 2_000


#: the office of the one replica that says goodput and closes lost requests
OFFICE = "goodput"
#: the durable consumer that all replicas share
CONSUMER = "accountant"
