"""Workers: rollouts in other processes and on a Ray cluster, whose paid calls come back to the run.

A worker holds no provider's key and no journal: it asks for text at the run's endpoint. Does not
know configs, tasks' order or what a policy does.
"""
