"""Ways to make a group in several draws: branches, trees, values at cuts, partial rollouts."""
