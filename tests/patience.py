"""How long a test waits for a program or an event before it gives up.

Longer than anything takes on a machine that is twenty times slower, shorter than pytest's limit
(300 s), so that a hang is told with the output there is.
"""

PATIENCE_S = 280
LONG_S = 2700
"""The limit of a test marked `long`."""
