"""Journals on a PostgreSQL server: several writers, leases, money in tranches.

Needs the extra `postgres` (psycopg 3); nothing here loads it before a server is used.
"""

from __future__ import annotations

__all__: list[str] = []
