"""Many servers of one model behind one backend: placement, health, hedging, draining."""
