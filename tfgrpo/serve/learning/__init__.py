"""From feedback to a better library: groups out of traffic, states, the live test."""
