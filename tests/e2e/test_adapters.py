"""LoRA adapters: who asks for one is answered by it or not at all."""

import pytest
from tests.e2e.running import Running

pytestmark = pytest.mark.timeout(120)


async def test_an_adapter_is_answered_by_itself_or_not_at_all(fleet: Running) -> None:
    """P17: a request for an adapter was served by the base model, without an error, and booked as such."""
    home = "b-chat-1"
    before = await fleet.received(home)
    async with fleet.session() as session:
        answers = [
            await fleet.ask(session, model="legal", prompt="Is that so?", tokens=4, stream=n % 2 == 0)
            for n in range(10)
        ]
        assert all(one.completed for one in answers), [one.error for one in answers]
        assert await fleet.received(home) - before >= 10, "it is loaded nowhere else"
        for one in answers[:2]:
            row = await fleet.final(one.request_id)
            assert (row["model_asked"], row["model_served"], row["instance"]) == ("legal", "legal", home)
            assert row["model"] == "chat-8b"

        seen = await fleet.received()
        nowhere = await fleet.ask(session, model="poetry", tokens=4, cls="interactive")
        assert (nowhere.status, nowhere.tokens) == (503, 0), nowhere
        assert int(nowhere.retry_after) >= 1
        unknown = await fleet.ask(session, model="alchemy", tokens=4)
        assert (unknown.status, unknown.code) == (404, "model_not_found")
        assert await fleet.received() == seen, "no engine has seen either"
