"""How fast a model runs on some hardware, as data. Decides nothing; refuses to know who runs it.

A step of D decoding sequences and P prefill tokens takes

    t_fix + max(t_w, c·(P+D)) + a·Σ chunk·(context + chunk/2) + k·Σ KV + per_sequence·n

where the first sum runs over the prefilled chunks, the second over the decoding sequences' contexts and n counts the
sequences of the step (form: BLIS, the "blackbox inference simulator", whose latency model is fitted to vLLM).

Where the numbers come from:

- `c` (time per token of the batch): fitted to Vidur's published kernel profiles (H100 7B 20.4 µs, 70B TP4 53.5 µs
  before the all-reduce; the A100 rows) and to llm-d's measurements (32B on 2 H100: 15,360–20,480 tokens/s).
- `a` (attention of a prefill, per pair of tokens): floating point operations at 50% of the peak.
- `t_w`, `k` (a decode step reads the weights and the KV once): BLIS' factors over memory bandwidth, weights ×1.36,
  KV ×1.95; `t_fix` 32 µs a layer and launch.
- A100 and L40S rows without a measurement: `a` scaled by dense BF16 peak (989 / 312 / 362 TFLOP/s), `t_w` and `k` by
  memory bandwidth (3.35 / 2.04 / 0.864 TB/s), from the vendors' data sheets.
- H200 rows: the H100's compute; `t_w` and `k` by memory bandwidth (4.8 TB/s), `kv_tokens` by its 141 GB.
- 32B on A100: `c` scaled as the 8B's measured pair, the rest as above.
- 480B (a mixture of experts, 35B active, 62 layers, 96 heads, 8 of them KV; FP8 weights): the same formulas, all
  experts read in a step; `c` is an estimate, 25% of the peak, because grouped matrix products and the all-reduce over
  eight GPUs cost more than a dense model's. No measurement behind it: scale it before trusting a result.
- `kv_tokens`: memory arithmetic, 90% of the memory less weights and 6 GB of activations; approximate.
- `cold_start_s`: SageServe charges 155 s for a replica (Jaiswal et al. 2025), taken as a 70B's; of it 45 s for process,
  graphs and warm-up, the rest in proportion to the weights (16, 64, 140 and 480 GB). An estimate.

Trust the ranking of two profiles, not the absolute times.
"""

import msgspec


class UnknownProfileError(ValueError):
    """No hardware profile of this name; the message lists those that exist."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown engine profile {name!r}; known: {', '.join(sorted(PROFILES))}")
        self.name = name


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one accelerator set, and the limits its engine was started with."""

    name: str
    #: launch and scheduling of a step, ms
    t_fix_ms: float
    #: reading the weights once, ms: the floor of a small batch
    t_w_ms: float
    #: compute of a token in the batch, µs
    c_us_per_token: float
    #: attention of a prefill, ns per pair (token, token before it)
    a_ns_per_pair: float
    #: reading KV in a decode, ns per context token
    k_ns_per_kv_token: float
    #: bookkeeping per sequence of a step, µs
    per_sequence_us: float = 4.4
    #: KV capacity, tokens
    kv_tokens: int
    #: tokens a step computes at most (vLLM: max_num_batched_tokens)
    token_budget: int = 2048
    #: sequences that run at once at most (vLLM: max_num_seqs)
    max_sequences: int = 256
    #: tokens of a KV block
    block_tokens: int = 16
    #: HTTP, tokenising and hand-over before a request reaches the scheduler, ms (BLIS)
    api_delay_ms: float = 15.6
    #: from the decision to start a replica until it answers, s
    cold_start_s: float = 155.0

    def scaled(self, speed: float) -> "Profile":
        """The same engine with every time divided by `speed`; capacities stay."""
        if speed <= 0:
            raise ValueError(f"speed must be positive, not {speed}")
        return msgspec.structs.replace(
            self,
            t_fix_ms=self.t_fix_ms / speed,
            t_w_ms=self.t_w_ms / speed,
            c_us_per_token=self.c_us_per_token / speed,
            a_ns_per_pair=self.a_ns_per_pair / speed,
            k_ns_per_kv_token=self.k_ns_per_kv_token / speed,
            per_sequence_us=self.per_sequence_us / speed,
            api_delay_ms=self.api_delay_ms / speed,
            cold_start_s=self.cold_start_s / speed,
        )

    def limited(self, *, token_budget: int = 0, max_sequences: int = 0, kv_tokens: int = 0) -> "Profile":
        """The same hardware started with other limits; 0 keeps what the profile says."""
        return msgspec.structs.replace(
            self,
            token_budget=token_budget or self.token_budget,
            max_sequences=max_sequences or self.max_sequences,
            kv_tokens=kv_tokens or self.kv_tokens,
        )


#: By name; see the module's docstring for sources.
PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        Profile(
            name="8b-h100",
            t_fix_ms=1.2,
            t_w_ms=6.5,
            c_us_per_token=22.0,
            a_ns_per_pair=1.06,
            k_ns_per_kv_token=76.0,
            kv_tokens=381_000,
            cold_start_s=58.0,
        ),
        Profile(
            name="32b-h100x2",
            t_fix_ms=2.2,
            t_w_ms=13.0,
            c_us_per_token=57.0,  # middle of 49–65
            a_ns_per_pair=1.6,
            k_ns_per_kv_token=60.0,
            kv_tokens=300_000,
            cold_start_s=95.0,
        ),
        Profile(
            name="70b-h100x4",
            t_fix_ms=2.7,
            t_w_ms=14.3,
            c_us_per_token=63.0,
            a_ns_per_pair=1.3,
            k_ns_per_kv_token=48.0,
            kv_tokens=418_000,
        ),
        Profile(
            name="8b-a100",
            t_fix_ms=1.2,
            t_w_ms=9.8,
            c_us_per_token=66.5,
            a_ns_per_pair=3.36,
            k_ns_per_kv_token=125.0,
            kv_tokens=381_000,
            cold_start_s=58.0,
        ),
        Profile(
            name="70b-a100x4",
            t_fix_ms=2.7,
            t_w_ms=25.0,
            # 161 measured, plus the all-reduce: the H100's 9.5 µs over 600 instead of 900 GB/s of NVLink
            c_us_per_token=175.0,
            a_ns_per_pair=4.1,
            k_ns_per_kv_token=79.0,
            kv_tokens=418_000,
        ),
        Profile(
            name="32b-a100x2",
            t_fix_ms=2.2,
            t_w_ms=21.3,
            c_us_per_token=172.0,
            a_ns_per_pair=5.1,
            k_ns_per_kv_token=99.0,
            kv_tokens=300_000,
            cold_start_s=95.0,
        ),
        Profile(
            name="8b-h200",
            t_fix_ms=1.2,
            t_w_ms=4.5,
            c_us_per_token=22.0,
            a_ns_per_pair=1.06,
            k_ns_per_kv_token=53.0,
            kv_tokens=800_000,
            cold_start_s=58.0,
        ),
        Profile(
            name="32b-h200x2",
            t_fix_ms=2.2,
            t_w_ms=9.1,
            c_us_per_token=57.0,
            a_ns_per_pair=1.6,
            k_ns_per_kv_token=42.0,
            kv_tokens=718_000,
            cold_start_s=95.0,
        ),
        Profile(
            name="70b-h200x4",
            t_fix_ms=2.7,
            t_w_ms=10.0,
            c_us_per_token=63.0,
            a_ns_per_pair=1.3,
            k_ns_per_kv_token=33.5,
            kv_tokens=1_088_000,
        ),
        Profile(
            name="480b-h200x8",
            t_fix_ms=2.0,
            t_w_ms=17.0,
            c_us_per_token=35.0,
            a_ns_per_pair=0.77,
            k_ns_per_kv_token=12.9,
            kv_tokens=2_030_000,
            cold_start_s=423.0,
        ),
        Profile(
            name="8b-l40s",
            t_fix_ms=1.2,
            t_w_ms=25.3,
            c_us_per_token=60.0,
            a_ns_per_pair=2.9,
            k_ns_per_kv_token=295.0,
            kv_tokens=161_000,
            cold_start_s=58.0,
        ),
    )
}


def profile(name: str) -> Profile:
    """The profile of this name. Raises `UnknownProfileError`."""
    found = PROFILES.get(name)
    if found is None:
        raise UnknownProfileError(name)
    return found


def cold_start_s(declared_s: float, profile_name: str, otherwise_s: float) -> float:
    """From an instance's start until it serves, s: as declared, as its profile says, or as the fleet does."""
    known = PROFILES.get(profile_name)
    return declared_s or (known.cold_start_s if known is not None else otherwise_s)
