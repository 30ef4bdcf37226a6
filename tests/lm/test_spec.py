import pytest

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.lm import open_lm, parse_spec


@pytest.mark.parametrize(
    ("spec", "backend", "model", "base_url"),
    [
        ("openai:gpt-x", "openai", "gpt-x", ""),
        ("http://127.0.0.1:8000/v1#smol", "openai", "smol", "http://127.0.0.1:8000/v1"),
        ("HTTPS://Host/v1/#org/name:tag", "openai", "org/name:tag", "https://Host/v1"),
        ("https://h/v1?api-version=3#m", "openai", "m", "https://h/v1?api-version=3"),
        ("litellm:anthropic/claude-x", "litellm", "anthropic/claude-x", ""),
        ("vllm:/models/x", "vllm", "/models/x", ""),
        ("local:smollm2-135m", "local", "smollm2-135m", ""),
        ("scripted:coin", "scripted", "coin", ""),
    ],
)
def test_each_form_is_parsed(spec, backend, model, base_url):
    parsed = parse_spec(spec)
    assert (parsed.backend, parsed.model, parsed.base_url) == (backend, model, base_url)


def test_options_in_a_spec_are_typed_and_leave_its_text():
    parsed = parse_spec("https://h/v1?api_key_env=MY_KEY&stream=false#m?max_rows=3")
    assert dict(parsed.options) == {"api_key_env": "MY_KEY", "stream": False, "max_rows": 3}
    assert parsed.text == "https://h/v1#m"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("opnai:gpt-x", "did you mean 'openai'"),
        ("zzz:gpt-x", "unknown backend 'zzz'"),
        ("gpt-x", "no backend before the model"),
        ("openai:", "no model after 'openai:'"),
        ("http://127.0.0.1/v1", "no model after '#'"),
        ("http:///v1#m", "no host"),
        ("litellm:claude", "PROVIDER/MODEL"),
        ("local:m?devise=cpu", "unknown option 'devise"),
        ("local:m?max_rows=many", "whole number"),
        ("http://h/v1?stream=perhaps#m", "true or false"),
        ("scripted:cion", "no script 'cion'"),
        ("local:./absent-folder", "neither"),
        (3, "not a string"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong_and_allowed(spec, words):
    with pytest.raises(ConfigError, match=None) as caught:
        open_lm(spec)
    assert words in str(caught.value)


def test_a_key_in_the_url_is_refused_and_not_repeated():
    with pytest.raises(ConfigError) as caught:
        parse_spec("https://user:hunter2pass@h/v1#m")
    assert "hunter2" not in str(caught.value) and "api_key_env" in str(caught.value)


def test_an_unknown_option_names_the_backend():
    with pytest.raises(ConfigError, match="scripted backend has no option 'devise'"):
        open_lm("scripted:coin", devise=1)


def test_a_missing_key_names_its_variable(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ProviderError, match="OPENAI_API_KEY") as caught:
        open_lm("openai:gpt-x")
    assert caught.value.kind == "auth"


def test_only_the_official_server_gets_the_default_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "CANARY-000111222333")
    official, other = open_lm("openai:gpt-x"), open_lm("http://h.example/v1#gpt-x")
    assert official.identity["credential"] and not other.identity["credential"]
    assert "CANARY" not in repr(official) + str(official.identity) + official.model_id


def test_identity_changes_with_model_url_and_key(monkeypatch):
    monkeypatch.setenv("A_KEY", "secret-number-one")
    monkeypatch.setenv("B_KEY", "secret-number-two")
    specs = [
        "http://h/v1#m",
        "http://h/v1#m2",
        "http://h:1/v1#m",
        "http://h/v1?api_key_env=A_KEY#m",
        "http://h/v1?api_key_env=B_KEY#m",
    ]
    seen = {str(open_lm(s).identity) for s in specs}
    assert len(seen) == len(specs)
    assert str(open_lm(specs[3]).identity) in seen
