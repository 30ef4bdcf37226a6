"""Backtests of routers on recorded outcomes."""
