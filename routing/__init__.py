"""Predicted success of any model on a prompt: routing and rollout budgets.

Does not know learning, search or training. Source: V_0 and the layers in `value_model`.
"""
