"""A failure before any byte of a request was sent: nothing can have been billed."""

from __future__ import annotations

from tfgrpo.errors import ProviderError

__all__ = ["NotSent"]


class NotSent(ProviderError):
    """No connection was made."""
