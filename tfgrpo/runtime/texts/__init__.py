"""Texts that others wrote: their lines, half characters, repetitions, and names of tools.

Source: own.
"""
