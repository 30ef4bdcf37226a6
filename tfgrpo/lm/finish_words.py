"""Why a reply ended: every server's words, in two tables, to ours.

Does not know replies. Source: the servers' own documentation; field reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tfgrpo.errors import ProviderError, ProviderFailure
from tfgrpo.protocols import Finish

T = TypeVar("T", bound=str)


def _spellings(words: Mapping[T, str]) -> Mapping[str, T]:
    return {word: meaning for meaning, spelt in words.items() for word in spelt.split()}


def _packed(words: Mapping[str, T]) -> Mapping[str, T]:
    """Return a table for words however their parts are joined: max_tokens, maxTokens."""
    return {word.replace("_", ""): meaning for word, meaning in words.items()}


FINISHES: Mapping[str, Finish] = _spellings(
    {
        "stop": """stop eos eos_token eos_found end end_of_text end_of_turn end_turn endoftext
            stop_sequence stop_string stop_token stop_word stop_words stopped complete completed
            completion finish finished done normal ended end_of_sequence
            </s> <|im_end|> <|eot_id|> <|endoftext|> <end_of_turn>""",
        "length": """length max_length max_tokens max_output_tokens max_new_tokens
            max_completion_tokens maximum_tokens token_limit model_length incomplete
            model_context_window_exceeded context_length_exceeded context_length truncated
            max_length_reached max_tokens_reached length_limit length_capped output_limit""",
        "tool_calls": "tool_calls tool_call tool_use function_call function_calls",
        "content_filter": """content_filter content_filtered content_filter_error refusal safety
            sensitive blocklist prohibited_content spii recitation image_safety moderation
            guardrail_intervened error_toxic blocked content_blocked content_policy_violation
            image_prohibited_content image_recitation filtered censored policy_violation""",
    }
)
"""The one table of finish words: every server's spelling, in lower case, to ours."""
FAILED_FINISHES: Mapping[str, ProviderFailure] = _spellings(
    {
        "overloaded": """abort aborted cancel cancelled canceled error error_limit failed failure
            network_error insufficient_system_resource overloaded internal_error load unload
            server_error engine_overloaded interrupted preempted user_cancel user_cancelled
            out_of_memory""",
        "rate_limit": "rate_limit rate_limited rate_limit_exceeded",
        "timeout": "timeout timed_out time_out time_limit deadline deadline_exceeded",
        "bad_reply": """malformed_function_call malformed_tool_use malformed_model_output
            malformed_response unexpected_tool_call""",
    }
)
"""Finish words that mean: this is no reply. Any word in neither table is a failure, too."""
_UNFINISHED = frozenset({"", "null", "none", "not_finished", "in_progress"})
_FINISHES, _FAILED_FINISHES = _packed(FINISHES), _packed(FAILED_FINISHES)


def finish_word(value: Any) -> str | None:
    """Return a server's finish reason in lower case; None where it says nothing yet.

    >>> finish_word("FinishReason.MAX_TOKENS"), finish_word({"type": "Length"}), finish_word("")
    ('max_tokens', 'length', None)
    """
    if isinstance(value, Mapping):
        value = value.get("type")
    if not isinstance(value, (str, int, float)):
        return None if value is None else type(value).__name__
    word = str(value).strip().rpartition(".")[2].lower().replace("-", "_").replace(" ", "_")
    word = word.removeprefix("finish_reason_").removeprefix("stop_reason_")
    return None if word in _UNFINISHED else word


def finish_of(value: Any, *, has_tool_calls: bool = False) -> Finish:
    """Return our word for a server's finish reason; None counts as `stop`.

    Raises:
        ProviderError: the word means that there is no reply, or nobody knows what it means.
    """
    word = finish_word(value) or "stop"
    packed = word.replace("_", "")
    finish = _FINISHES.get(packed)
    if finish is None:
        kind = _FAILED_FINISHES.get(packed)
        what = "which is no reply" if kind else "which is no finish reason that is known here"
        raise ProviderError(
            f"the reply ended with finish_reason {word[:60]!r}, {what}",
            kind=kind or "bad_reply",
            had_output=True,
        )
    return "tool_calls" if has_tool_calls and finish == "stop" else finish


def refuse_failed_finish(value: Any) -> None:
    """Raise for a finish reason that is known to mean that there is no reply; let others pass.

    Raises:
        ProviderError: the word is one of failure.
    """
    word = finish_word(value) or "stop"
    if word.replace("_", "") in _FAILED_FINISHES:
        finish_of(value)
