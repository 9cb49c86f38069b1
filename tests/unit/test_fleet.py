"""What a fleet file may say, and what a name that a client asks for means."""

import pytest
from tests.simulation.harness import SMALL

from tokenfleet import fleet as fleets
from tokenfleet.fleet import FleetError

MODEL = 'versions = ["1", "2"]'


def parsed(adapters: str, more: str = "") -> fleets.Fleet:
    """The small fleet with adapters of its model."""
    text = SMALL.format(instances="") + more
    assert text.count(MODEL) == 1
    return fleets.parse(text.replace(MODEL, f"{MODEL}\nadapters = {adapters}").encode())


def test_an_adapter_is_asked_for_by_its_own_name() -> None:
    """P17: by some spellings the base model answered for an adapter."""
    fleet = parsed('["legal", "sql"]')
    assert fleet.resolve("legal") == ("m", "1", "legal")
    assert fleet.resolve("m") == fleet.resolve("m@1") == ("m", "1", "")
    assert fleet.resolve("m@legal") is fleet.resolve("legal@1") is fleet.resolve("poetry") is None


@pytest.mark.parametrize(
    ("adapters", "finding"),
    [
        ('["m"]', "'m' is a model"),
        ('["a@b"]', "'a@b' is not a usable name"),
        ('["a b"]', "'a b' is not a usable name"),
    ],
)
def test_an_adapter_that_nobody_could_ask_for_is_an_error(adapters: str, finding: str) -> None:
    """A name that means two things is found when the file is read, not when a client asks."""
    with pytest.raises(FleetError, match=finding):
        parsed(adapters)


def test_an_emulated_engine_loads_only_what_its_model_declares() -> None:
    """It would be listed by its engine and asked for by nobody."""
    instance = '[sites.b.instances.b-9]\nmodel = "m"\nversion = "1"\nurl = "http://x"\nadapters = ["{}"]\n'
    assert parsed('["legal"]', instance.format("legal")).sites["b"].instances["b-9"].adapters == ("legal",)
    with pytest.raises(FleetError, match="declares no 'poetry'"):
        parsed('["legal"]', instance.format("poetry"))
