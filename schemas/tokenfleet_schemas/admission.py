"""Whether and when: SLOMax's facts."""

from tokenfleet_schemas.event import Event, Part
from tokenfleet_schemas.request import Ask


class AdmissionDecided(Event, frozen=True, kw_only=True, tag="tokenfleet.admission.v1.decided"):
    """SLOMax (or, marked `fallback`, the gateway itself) let a request in or refused it."""

    ask: Ask
    attempt: int = 1
    revision: int = 0
    elapsed_ms: float = 0.0
    admitted: bool
    #: of a closed list (`REASONS`); empty when admitted without remark
    reason: str = ""
    #: HTTP status of a refusal; 0 when admitted
    status: int = 0
    retry_after_s: float | None = None
    fallback: bool = False


class Share(Part, frozen=True, kw_only=True):
    """One class's part of a pool."""

    service_class: str
    #: guaranteed part of released work, 0..1
    share: float
    #: part that it really got in the last interval, 0..1
    used: float = 0.0
    held: int = 0
    #: why the share is what it is
    cause: str = "configured"


class AdmissionShared(Event, frozen=True, kw_only=True, tag="tokenfleet.admission.v1.shared"):
    """The shares of a pool (site × model version) and what caused them; `site` is the pool's site."""

    model: str
    version: str
    revision: int
    shares: tuple[Share, ...]


class AdmissionLent(Event, frozen=True, kw_only=True, tag="tokenfleet.admission.v1.lent"):
    """An entry (`site`) lends another one of a tenant's quota. Totals since the quota began, never steps.

    Parts of all entries and what is on the way sum to the quota: the giver has less once it has said so, the receiver
    more once it has read it. Counts only while the tenant's quota and the number of entries are those named here.
    """

    tenant: str
    receiver: str
    revision: int
    #: requests at once
    concurrent: int = 0
    #: of the token rate, and of the bucket that it fills
    tokens_per_minute: float = 0.0
    #: tokens that lay in that part of the bucket
    tokens: float = 0.0
    of_concurrent: int = 0
    of_tokens_per_minute: float = 0.0
    of_entries: int = 1


class AdmissionOwned(Event, frozen=True, kw_only=True, tag="tokenfleet.admission.v1.owned"):
    """A SLOMax replica took office for a scope; lower terms after this mark are void."""

    #: `admission:<entry>` or `release:<site>`
    scope: str
    owner: str


#: every reason for which a request can be refused, with its HTTP status
REASONS: dict[str, int] = {
    "tenant_concurrency": 429,
    "tenant_rate": 429,
    "saturated": 429,
    "queue_full": 429,
    "gateway_full": 429,
    "patience": 503,
    "residency_no_capacity": 503,
    "no_capacity": 503,
    "model_not_ready": 503,
    "unavailable": 503,
    "residency": 403,
    "not_permitted": 403,
}
