"""Which hosts are this machine. Does not open connections. Source: RFC 6890 (loopback ranges)."""

from __future__ import annotations

import ipaddress

__all__ = ["is_loopback"]


def is_loopback(host: str) -> bool:
    """True for a host, name or address, that only this machine reaches.

    >>> [is_loopback(h) for h in ("localhost", "127.9.0.1", "::1", "::ffff:127.0.0.1", "::1:2")]
    [True, True, True, True, False]
    """
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
