"""What counts as an engine's restart: every false one drops its requests and its prefix index."""

from tokenfleet.siteagent.policy import restarted
from tokenfleet.siteagent.state import Metrics


def test_a_difference_of_counters_that_steps_back_is_no_restart() -> None:
    """Under load an engine counted cache hits at admission and prompts at the first token; the computed tokens, taken
    as their difference, stepped back, and busy engines were declared restarted every few seconds."""
    before = Metrics(prompt_tokens_total=5_000, generation_tokens_total=70, preemptions_total=2)
    after = Metrics(prompt_tokens_total=4_200, generation_tokens_total=71, preemptions_total=2)
    assert not restarted(before, after)
    assert restarted(before, Metrics(prompt_tokens_total=0, generation_tokens_total=0, preemptions_total=0))
    assert not restarted(None, after)
    assert not restarted(before, Metrics())
