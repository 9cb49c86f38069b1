"""How many KV blocks per second one process takes in, and what a digest costs. `python -m benchmarks.kv_ingest`.

Two halves of one way: the site agent turns an engine's blocks into digests (decoding, hashing, counting copies), and
TokenPilot follows the digests. Both at a steady state, in which each prompt that comes throws an old one out. Prints
one line of JSON.
"""

import argparse
import json
import random
import sys
import time
import tracemalloc
from array import array

import msgspec

from tokenfleet import fleet as fleets
from tokenfleet import prefix
from tokenfleet.siteagent.kv_events import Blocks, Content, Feed, Keys
from tokenfleet.tokenpilot.exact_index import ExactIndex
from tokenfleet.tokenpilot.prefix_index import PrefixIndex
from tokenfleet_schemas import codec
from tokenfleet_schemas.kv import KvChanged

_SECRET = "benchmark"
_FLEET = b"""
[fleet]
name = "f"
default_class = "chat"
[sites.b]
zone = "eu"
entry = true
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 100000
[classes.chat]
[tenants.acme]
zones = ["eu"]
classes = ["chat"]
"""


def agent(block_tokens: int, prompt_tokens: int, seconds: float) -> dict[str, float]:
    """Blocks per second of one feed: a prompt stored and an old one removed per message."""
    salt = prefix.cache_salt(_SECRET, "acme")
    dice = random.Random(1)
    count = prompt_tokens // block_tokens
    payloads, names = [], []
    for n in range(64):
        names.append([dice.getrandbits(64) for _ in range(count)])
        stored = {
            "type": "BlockStored",
            "block_hashes": names[n],
            "parent_block_hash": None,
            "token_ids": dice.choices(range(150_000), k=count * block_tokens),
            "block_size": block_tokens,
            "extra_keys": [[salt]] + [None] * (count - 1),
        }
        events = [stored]
        if n >= 32:
            events.append({"type": "BlockRemoved", "block_hashes": names[n - 32]})
        payloads.append(events)
    for n in range(32):
        payloads[n].append({"type": "BlockRemoved", "block_hashes": names[n + 32]})
    wire = [msgspec.msgpack.encode([float(n), events, 0]) for n, events in enumerate(payloads)]
    content = Content()
    feed = Feed(Blocks(content, Keys(fleets.parse(_FLEET), _SECRET)))
    sequence, blocks = 0, 0
    began = time.process_time()
    while (spent := time.process_time() - began) < seconds:
        feed.offer(sequence, wire[sequence % 64])
        blocks += 2 * count
        sequence += 1
        if sequence % 4 == 0:
            content.take()
    return {"blocks_per_s": round(blocks / spent), "held_digests": len(content)}


def pilot(instances: int, seconds: float, per_message: int = 128) -> dict[str, float]:
    """Digests per second of one reader, from the bus's bytes to TokenPilot's index."""
    dice = random.Random(1)
    ring = [array("Q", (dice.getrandbits(64) for _ in range(per_message))).tobytes() for _ in range(512)]
    exact = ExactIndex("b", replica="r", content=PrefixIndex(1_000_000))
    names = [f"b{n}" for n in range(instances)]
    for name in names:
        list(exact.changed(_change(name, 0, b"", b"", snapshot=True), 0))
    # encoded beforehand: the bus's bytes are what a reader begins with
    messages: list[bytes] = []
    for n in range(1, 257):
        stored, removed = ring[n % 512], ring[(n - 128) % 512]
        messages.append(codec.encode_packed(_change(names[0], n, stored, removed)))
    digests, turn = 0, 0
    began = time.process_time()
    while (spent := time.process_time() - began) < seconds:
        turn += 1
        name = names[turn % instances]
        for n in range(256):
            event = codec.decode_packed(messages[n])
            assert isinstance(event, KvChanged)
            event = msgspec.structs.replace(event, instance=name, sequence=256 * ((turn - 1) // instances) + n + 1)
            for _ in exact.changed(event, 0.0):
                pass
            digests += 2 * per_message
    return {"digests_per_s": round(digests / spent)}


def memory(digests: int = 200_000, *, kept: int = 1_000_000) -> float:
    """Bytes per digest of one instance at the worst moment: growing, or with `kept` fewer, under replacement."""
    dice = random.Random(1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    content = PrefixIndex(kept)
    worst = 0.0
    for n in range(0, digests, 1000):
        content.store("b1", [dice.getrandbits(64) for _ in range(1000)])
        if n >= 10_000:
            worst = max(worst, (tracemalloc.get_traced_memory()[0] - before) / len(content))
    tracemalloc.stop()
    return round(worst, 1)


def _change(instance: str, sequence: int, stored: bytes, removed: bytes, *, snapshot: bool = False) -> KvChanged:
    return KvChanged(
        id=f"kv:{instance}:{sequence}",
        site="b",
        model="m",
        instance=instance,
        incarnation="1",
        sequence=sequence,
        stored=stored,
        removed=removed,
        snapshot=snapshot,
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_ingest", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU time per measurement")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--instances", type=int, default=100)
    options = parser.parse_args()
    followed = pilot(options.instances, options.seconds)
    followed["blocks_per_s"] = round(followed["digests_per_s"] * prefix.CHUNK_TOKENS / options.block_tokens)
    found = {
        "block_tokens": options.block_tokens,
        "agent": agent(options.block_tokens, options.prompt_tokens, options.seconds),
        "pilot": followed,
        "bytes_per_digest_worst": {"growing": memory(), "replacing": memory(kept=45_000)},
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
