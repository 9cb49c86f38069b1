"""Faults on command, as data."""

import pytest

from tokenfleet.emulator.faults import FaultError, Faults, parse


def test_a_counted_fault_ends_by_itself() -> None:
    """ "The first attempt fails, the second does not" is the commonest test of a gateway."""
    faults = Faults()
    faults.add(parse(b'{"kind":"refuse","count":2}'))
    assert [faults.meet("refuse") is not None for _ in range(3)] == [True, True, False]
    faults.add(parse(b'{"kind":"reset","n":3}'))
    faults.add(parse(b'{"kind":"reset","n":5}'))
    assert [fault.n for fault in faults.active()] == [5]
    faults.clear()
    assert faults.meet("reset") is None


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"kind":"explode"}', "known: refuse, hang"),
        (b"{", "malformed|truncated"),
        (b'{"kind":"slow","factor":0}', "positive"),
        (b'{"kind":"hang","scope":"world"}', "scope"),
        (b'{"kind":"refuse","count":0}', "count"),
        (b'{"n":1}', "kind"),
    ],
)
def test_a_wrong_command_says_what_would_be_right(body: bytes, says: str) -> None:
    """A test that mistypes a fault must fail, not pass without one."""
    with pytest.raises(FaultError, match=says):
        parse(body)
