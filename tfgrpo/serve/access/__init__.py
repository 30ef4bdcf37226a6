"""Who may ask and what it may cost: keys, rates, caps, the booking of calls, idempotency."""
