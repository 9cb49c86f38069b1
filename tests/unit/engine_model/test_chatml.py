"""The chat template, by hand and by jinja."""

import jinja2.sandbox

from tokenfleet import chatml

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "a <b>"}, {"type": "text", "text": "ü"}]},
    {"role": "assistant", "content": None},
    {"role": "user", "content": ""},
]


def test_both_renderings_are_the_same_bytes() -> None:
    """The gateway predicts prefix hits from its own rendering; one byte off and every block after it misses."""
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na <b>ü<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chatml.render(MESSAGES) == expected
    for trim in (False, True):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=trim, lstrip_blocks=trim)
        assert environment.from_string(chatml.JINJA).render(messages=MESSAGES) == expected
