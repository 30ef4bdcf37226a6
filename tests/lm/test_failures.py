import pytest

from tfgrpo.lm.failures import error_in_body, failure_kind, http_failure, retry_after


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, "", "auth"),
        (403, "", "auth"),
        (403, "content_policy violation", "refused"),
        (402, "", "quota"),
        (404, "", "not_found"),
        (302, "", "not_found"),
        (408, "", "timeout"),
        (504, "", "timeout"),
        (409, "", "overloaded"),
        (425, "", "overloaded"),
        (429, "Rate limit reached", "rate_limit"),
        (429, '{"code": "insufficient_quota"}', "quota"),
        (429, "You exceeded your current quota", "quota"),
        (500, "", "overloaded"),
        (502, "<html>", "overloaded"),
        (503, "", "overloaded"),
        (529, "", "overloaded"),
        (599, "", "overloaded"),
        (400, "This model's maximum context length is 8192 tokens", "context_too_long"),
        (413, "prompt is too long", "context_too_long"),
        (400, "flagged by content_filter", "refused"),
        (400, "The model `x` does not exist", "not_found"),
        (400, "temperature must be at most 2", "bad_request"),
        (422, "", "bad_request"),
        (405, "", "bad_request"),
        (418, "", "bad_request"),
    ],
)
def test_each_status_has_a_kind(status, body, kind):
    assert failure_kind(status, body) == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "overloaded, try again"}, "overloaded"),
        ({"code": 429, "message": "slow down"}, "rate_limit"),
        ({"code": "401", "message": "no"}, "auth"),
        ({"type": "insufficient_quota"}, "quota"),
        ({"message": "maximum context length is 10"}, "context_too_long"),
        ({"type": "invalid_request_error", "message": "bad"}, "bad_request"),
        ("rate limit", "rate_limit"),
        ({"message": "mystery"}, "bad_reply"),
    ],
)
def test_an_error_inside_a_200_is_classified_by_content(error, kind):
    assert error_in_body(error) == kind


NOW = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": " 0.25 "}, 0.25),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:47 GMT"}, 10.0),
        ({"retry-after": "Sun, 06 Nov 1994 09:49:47 +0100"}, 10.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:00:00 GMT"}, 0.0),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"x-ms-retry-after-ms": "20"}, 0.02),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after-ms": "x", "retry-after": "2"}, 2.0),
        ({"retry-after": "Sun, 99 Nov 1994 08:49:47 GMT"}, None),
        ({}, None),
    ],
)
def test_hints_are_read_in_every_spelling_and_garbage_is_ignored(headers, seconds):
    assert retry_after(headers, now=NOW) == seconds


def test_an_auth_failure_names_the_source_and_the_url_not_the_key():
    error = http_failure(
        401, {}, "Incorrect API key provided: sk-abcdefghijklmnop", where="model 'm' at http://h/v1",
        key_source="from environment variable X",
    )  # fmt: skip
    assert "environment variable X" in str(error) and "http://h/v1" in str(error)
    assert "abcdefgh" not in str(error)
    assert error.is_fatal and error.status == 401


def test_a_huge_body_is_kept_to_200_characters():
    error = http_failure(500, {}, "x" * 10_000, where="w", key_source="none")
    assert len(str(error)) < 300
