"""docs/metrics.md defines every symbol; a figure that nobody defined is a figure that two people read differently."""

import re
from pathlib import Path
from typing import get_args

from tokenfleet.accountant import service
from tokenfleet.accountant.policy import GROUP_OF
from tokenfleet.accountant.report import Result
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.goodput import GoodputMeasured
from tokenfleet_schemas.outcome import Outcome, Times

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
#: names of things, not figures
_NAMES = {"service_class", "tenant", "model", "window_s", "window_end_unix_ms", "group"}


def test_every_figure_is_defined() -> None:
    """A field added to the windows, the times or the report appears in the document."""
    fields = {*GoodputMeasured.__struct_fields__, *Times.__struct_fields__, *Result.__struct_fields__}
    # sums that the document gives in words: "compliant output tokens", "offered output tokens"
    for name in sorted(fields - set(Event.__struct_fields__) - _NAMES - {"compliant_tokens", "offered_tokens"}):
        assert re.search(rf"\b{name}\b", TEXT), name


def test_every_outcome_is_in_the_table() -> None:
    """Each outcome is named in the line under which it is counted."""
    for outcome in get_args(Outcome):
        assert re.search(rf"^\| `{GROUP_OF[outcome]}` \|.*`{outcome}`", TEXT, re.MULTILINE), outcome


def test_every_metric_of_the_writer_is_listed() -> None:
    """What can be scraped can be looked up."""
    source = Path(service.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r'"(tokenfleet_[a-z_]+)"', source))
    assert names
    for name in names:
        assert name in TEXT, name
