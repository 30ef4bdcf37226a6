"""Where paid work is kept: journal, cache, budget and ledger, resume, export.

Names are loaded on first use, so importing this package costs nothing.
"""
