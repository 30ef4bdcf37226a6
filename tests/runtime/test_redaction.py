import base64
import copy
import logging
from urllib.parse import quote

import pytest

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.redaction import MASK, RedactingFilter, Secret, forget_secrets, redact, register

KEY = "CANARY-7f3a+9c51/d2e84b60"


@pytest.fixture(autouse=True)
def _known():
    forget_secrets()
    register(KEY)
    yield
    forget_secrets()


def windows(text: str, size: int = 6) -> list[str]:
    return [text[i : i + size] for i in range(len(text) - size + 1)]


@pytest.mark.parametrize("start", range(0, len(KEY) - 6, 3))
def test_no_piece_of_six_characters_survives(start):
    said = redact(f"bad key {KEY[start : start + 9]}**** given")
    assert not [w for w in windows(KEY) if w in said]


def test_encoded_forms_are_found():
    for form in (quote(KEY, safe=""), KEY.encode().hex()):
        said = redact(f"GET https://h/x?a={form}&b=1")
        assert not [w for w in windows(form) if w in said]
        assert said.endswith("&b=1")


@pytest.mark.parametrize("prefix", ["", "u", "us", "user:"])
def test_base64_is_found_at_any_alignment(prefix):
    form = base64.b64encode((prefix + KEY).encode()).decode()
    said = redact(form)
    whole = base64.b64encode(KEY.encode()).decode()
    if not prefix:
        assert not [w for w in windows(whole.rstrip("=")[:-1]) if w in said]
    assert MASK in said and len(said) < len(form) - 20


def test_texts_without_secrets_are_unchanged():
    text = "The capital of France is Paris; token count 12, key insight: keep it."
    assert redact(text) == text


@pytest.mark.parametrize(
    "leak",
    [
        "sk-proj-abcdefghijklmnop1234",
        "hf_abcdefghijklmnopqrst",
        "Bearer abcdefgh12345678",
        "https://user:passw0rd@host/x",
        'api_key="abcdef123456"',
        "https://h/v1?key=abcdef123456",
    ],
)
def test_patterns_of_unknown_keys_are_masked(leak):
    said = redact(f"error: {leak}")
    assert MASK in said
    assert "abcdef" not in said and "passw0rd" not in said


def test_placeholders_and_short_values_are_no_secrets():
    register("EMPTY")
    register("abc")
    assert redact("EMPTY abc") == "EMPTY abc"


def test_a_secret_shows_only_its_source_and_is_never_copied_out():
    secret = Secret("another-secret-0001", "environment variable X")
    assert repr(secret) == str(secret) == "Secret(from environment variable X)"
    assert secret.fingerprint not in secret.value and len(secret.fingerprint) == 16
    with pytest.raises(TypeError, match="not written"):
        copy.copy(secret)


def test_a_key_with_a_line_break_is_a_config_error_without_the_key(monkeypatch):
    monkeypatch.setenv("X_KEY", "first-line-secret\nsecond")
    with pytest.raises(ConfigError, match="X_KEY") as caught:
        Secret.from_environment("X_KEY")
    assert "first-line" not in str(caught.value)


def test_log_records_and_tracebacks_are_redacted(caplog):
    logger = logging.getLogger("test.redaction")
    logger.addFilter(RedactingFilter())
    try:
        raise ValueError(f"url with {KEY}")
    except ValueError:
        logger.exception("failed with %s", KEY)
    assert "CANARY" not in caplog.text and MASK in caplog.text
