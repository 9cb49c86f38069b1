"""`tokenfleet reserve`: what is wrong with the command is said before anything is asked of anybody."""

import pytest

from tokenfleet.cli.__main__ import main

RIGHT = ("--site", "b", "--model", "m", "--tenant", "t", "--gpus", "1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "night", "--site", "b", "--model", "m", "--gpus", "1", "--for", "1h"), "--tenant, a --class"),
        (("add", "night", *RIGHT), "--until or --for"),
        (("add", "night", *RIGHT, "--for", "1h", "--until", "2030-01-01T00:00Z"), "--until or --for"),
        (("add", "night", *RIGHT, "--for", "soon"), "no length of time"),
        (("add", "night", *RIGHT, "--until", "tomorrow"), "no time like"),
        (("add", "night", *RIGHT, "--until", "2030-01-01T00:00"), "needs an offset"),
        (("add", "night", *RIGHT, "--from", "2030-01-02T00:00Z", "--until", "2030-01-01T00:00Z"), "end before"),
        (("add", "a night", *RIGHT, "--for", "1h"), "no usable name"),
        (("cancel", "Night"), "no usable name"),
        (("list", "--nats", "http://nowhere"), "expected nats://"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line, with no server anywhere."""
    assert main(["reserve", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("gpus", ["0", "-1", "many", "nan"])
def test_gpus_are_a_positive_number(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A promise of nothing, or of less."""
    with pytest.raises(SystemExit) as ended:
        main(["reserve", "add", "night", "--site", "b", "--model", "m", "--tenant", "t", f"--gpus={gpus}"])
    assert ended.value.code == 2
    assert "no positive number of GPUs" in capsys.readouterr().err
