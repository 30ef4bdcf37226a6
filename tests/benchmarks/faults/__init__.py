"""Readers of foreign text, put to the test with texts that nobody means well."""
