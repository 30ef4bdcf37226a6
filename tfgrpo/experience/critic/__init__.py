"""The critic: reads groups through an LM and proposes edits of the library."""
