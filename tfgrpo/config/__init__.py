"""Settings of a run: sections read from TOML, with mistakes explained."""
