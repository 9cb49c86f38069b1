"""The readiness of every instance, live. Needs `pip install tokenfleet` and the password of user `subscriber`."""

import asyncio
import os

import nats

from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.codec import decode
from tokenfleet_schemas.routes import stream_of, subject_filter


async def main() -> None:
    client = await nats.connect(os.environ["TOKENFLEET_NATS_URL"], inbox_prefix="_INBOX_subscriber")
    reports = await client.jetstream().subscribe(
        subject_filter(CapacityReported), stream=stream_of(CapacityReported), ordered_consumer=True
    )
    async for message in reports.messages:
        event = decode(message.data)
        print(event.instance, event.model, "ready" if event.ready else event.reason, event.running, flush=True)


asyncio.run(main())
